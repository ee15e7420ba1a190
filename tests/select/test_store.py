"""Tuned results: kept apart by question, whole under concurrent writers, set aside when broken."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from dataclasses import replace

import pytest
import torch

from weft import Unsupported
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule
from weft.select import store

OPERATION = AllGatherMatmul.of(1000, 500, 300, 2)
ANSWER = store.Answer(Schedule.parse("adaptive:16@dma"), 1e-3, 2e-3)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return store.question(OPERATION, "memory", "1.2.3")


def test_an_answer_is_found_again(asked, tmp_path):
    assert store.find(asked) is None
    path = store.keep(asked, ANSWER)
    assert tmp_path in path.parents
    assert store.find(asked) == ANSWER
    assert [p.suffix for p in path.parent.iterdir()] == [".json"]


def test_a_bucket_holds_near_sizes_and_no_far_ones(asked):
    near = AllGatherMatmul.of(1040, 510, 290, 2)
    far = AllGatherMatmul.of(2000, 500, 300, 2)
    assert store.question(near, "memory", "1.2.3") == asked
    assert store.question(far, "memory", "1.2.3") != asked


def test_ranks_of_other_threads_ask_another_question() -> None:
    asked, threads = store.question(OPERATION, "memory", "1"), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert store.question(OPERATION, "memory", "1") != asked
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "other",
    [
        {"version": "1.2.4"},
        {"link": "0.1GB/s mesh"},
        {"world": 4},
        {"dtype": "bfloat16"},
        {"machine": "another"},
        {"operation": "matmul_all_reduce"},
    ],
)
def test_other_questions_have_other_answers(asked, other):
    store.keep(asked, ANSWER)
    assert store.find(replace(asked, **other)) is None


@pytest.mark.parametrize("harm", ["empty", "torn", "noise", "changed", "list", "name", "moved"])
def test_a_broken_file_is_set_aside_and_said_so(asked, harm):
    path = store.keep(asked, ANSWER)
    text = path.read_text()
    if harm == "empty":
        path.write_text("")
    elif harm == "torn":
        path.write_text(text[: len(text) // 2])
    elif harm == "noise":
        path.write_bytes(b"\xff\x00\xfe" * 40)
    elif harm == "changed":
        path.write_text(text.replace("0.001", "0.009"))
    elif harm == "list":
        path.write_text("[1, 2]")
    elif harm == "name":
        content = {**json.loads(text), "schedule": "no-such-schedule"}
        content.pop("digest")
        path.write_text(json.dumps({**content, "digest": store._digest(content)}))
    else:
        other = replace(asked, world=7)
        store.keep(other, ANSWER).replace(path)
    with pytest.warns(UserWarning, match="does not hold"):
        assert store.find(asked) is None
    assert not path.exists()
    assert len(list(path.parent.glob("*.corrupt"))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.find(asked) is None
    store.keep(asked, ANSWER)
    assert store.find(asked) == ANSWER


def test_writers_and_readers_at_once_see_whole_answers(asked):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(asked, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(writer.is_alive() for writer in writers):
            found = store.find(asked)
            if found is not None:
                seen.add(found.schedule.depth)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen <= {1, 2, 3}
    assert store.find(asked) is not None
    assert [p.suffix for p in asked.path.parent.iterdir()] == [".json"]


def _write_many(asked: store.Question, number: int) -> None:
    schedule = replace(ANSWER.schedule, depth=number + 1)
    for _ in range(60):
        store.keep(asked, replace(ANSWER, schedule=schedule))


def test_a_folder_that_cannot_be_written_is_one_sentence(asked, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(Unsupported, match="cannot write"):
        store.keep(asked, ANSWER)
