"""Ctrl-C in a command: what was finished is printed, marked as partial, with exit code 130."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weft.benchmarks import Check, Result
from weft.cli import bench, characterize, explore, judge, run, tune
from weft.errors import keeping

TINY = ("--m", "32", "--n", "64", "--k", "32")


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Tests that run as a background job of a shell are started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def stopping_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int], None]:
    """Makes a command's progress send a real SIGINT to this process at its n-th report."""

    def patch(module: Any, number: int) -> None:
        count = 0

        @contextmanager
        def progress(*_: object, **__: object) -> Iterator[Callable[[float, str], None]]:
            def report(share: float, text: str) -> None:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGINT)

            yield report

        monkeypatch.setattr(module, "progress", progress)

    return patch


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
def test_explore_shows_the_shapes_that_were_finished(
    as_json: bool, weft: Callable, stopping_at: Callable, tmp_path: Any
) -> None:
    (tmp_path / "mine.csv").write_text("id,m,n,k\na,4096,4096,1024\nb,4096,4096,512\nc,64,64,64\n")
    stopping_at(explore, 3)
    arguments = ("--shapes", "mine.csv", "--schedule", "serial", *(("--json",) * as_json))
    done = weft("explore", *arguments)
    assert done.returncode == 130
    assert "partial, of 2 of 3 shapes" in done.stderr
    if as_json:
        found = json.loads(done.stdout)
        assert found["partial"] is True
        assert [one["id"] for one in found["scenarios"]] == ["a", "b"]
    else:
        assert "over serial" in done.stdout


def test_without_a_finished_shape_nothing_is_printed(weft: Callable, stopping_at: Callable) -> None:
    stopping_at(explore, 1)
    done = weft("explore", "--m", "4096", "--n", "4096", "--k", "512", "--schedule", "serial")
    assert (done.returncode, done.stdout) == (130, "")


def test_characterize_shows_the_shapes_that_were_finished(
    weft: Callable, stopping_at: Callable
) -> None:
    stopping_at(characterize, 4)
    done = weft("characterize", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 130
    assert found["partial"] is True
    assert len(found["shapes"]) == 3


def test_judge_shows_the_scenarios_that_were_finished(
    weft: Callable, stopping_at: Callable
) -> None:
    stopping_at(judge, 2)
    done = weft("judge", "--random", "40", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 130
    assert found["partial"] is True
    assert 1 <= found["scenarios"] == len(found["verdicts"]) < 40


def test_run_ends_after_the_round_that_is_running(weft: Callable, stopping_at: Callable) -> None:
    stopping_at(run, 6)
    before = signal.getsignal(signal.SIGINT)
    arguments = ("--schedule", "serial,adaptive@dma", "--repeat", "10000", "--json")
    done = weft("run", "all_gather_matmul", *TINY, *arguments)
    found = json.loads(done.stdout)
    assert done.returncode == 130
    assert found["partial"] is True
    assert "of 10000 rounds" in found["stopped"]
    assert found["schedules"]
    assert "weft: stopping after this round" not in done.stdout
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_tune_keeps_the_rounds_that_were_finished(
    as_json: bool, weft: Callable, stopping_at: Callable
) -> None:
    stopping_at(tune, 6)
    arguments = ("--repeat", "10000", *(("--json",) * as_json))
    done = weft("tune", "all_gather_matmul", *TINY, *arguments)
    assert done.returncode == 130
    assert "of 10000 rounds" in done.stderr
    assert "auto uses" in done.stdout
    if as_json:
        found = json.loads(done.stdout)
        assert found["partial"] is True
        assert list(found["tuned"]) == [found["operation"]]
        assert found["times"][found["operation"]]["serial_ms"] > 0


def test_bench_shows_what_was_measured(weft: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["a", 1.0]]

    def half(report: object) -> Result:
        with keeping(lambda: Result(("case", "ms"), rows, [Check("c", 1.0, ">= 1")])):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    whole = Result(("case", "ms"), [["whole", 2.0]], [])
    functions = {"overlap": lambda report: whole, "operators": half, "engines": half}
    monkeypatch.setattr(bench.benchmarks, "find", functions.__getitem__)
    done = weft("bench", "overlap", "operators", "engines")
    assert done.returncode == 130
    said = " ".join(done.stdout.split())
    assert "weft bench operators" in said
    assert "weft bench engines" not in said
    assert "1 of 3 benchmarks and a part of operators" in done.stderr
    found = json.loads(weft("bench", "overlap", "operators", "--json").stdout)
    assert found["partial"] is True
    assert found["operators"]["rows"] == [{"case": "a", "ms": 1.0}]
