"""Libraries that `weft bench collectives` compares with: found or missing, and what a run tells."""

from __future__ import annotations

import json
import sys

import pytest

from weft.measure import other_libraries
from weft.measure.other_libraries import find_deepspeed, find_mpich


def test_a_library_that_is_not_there_is_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_MPI_PYTHON", str(tmp_path / "python"))
    monkeypatch.setenv("WEFT_DEEPSPEED_PYTHON", str(tmp_path / "python"))
    assert find_mpich() == "MPICH not found: set WEFT_MPI_PYTHON"
    assert find_deepspeed() == "DeepSpeed not found: set WEFT_DEEPSPEED_PYTHON"


def script(body):
    sizes, cores = json.dumps([[1, 2, 3], [4, 1, 2]]), json.dumps([[0]])
    return [sys.executable, "-c", other_libraries._LOOP + body, sizes, cores]


def test_a_run_times_every_size_and_tells_it_in_its_last_line():
    body = """
made = []
print("something that a library says")
measure(0, lambda count: {"a": lambda: made.append(count), "b": lambda: None}, lambda: None)
assert made == [256] * 7 + [1024] * 3
"""
    times = other_libraries._read([script(body)])
    assert {key: len(taken) for key, taken in times.items()} == {
        ("a", 1): 3,
        ("b", 1): 3,
        ("a", 4): 2,
        ("b", 4): 2,
    }


@pytest.mark.parametrize("body", ["raise SystemExit(1)", "pass"])
def test_a_run_that_fails_gives_nothing(body):
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert other_libraries._read([script(body), waiting]) == {}
