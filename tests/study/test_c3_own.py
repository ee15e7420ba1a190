"""A GEMM and a collective of one's own: times alone, what strategies make of them, which to use."""

from __future__ import annotations

import pytest

from weft.errors import Unsupported
from weft.machine import load
from weft.simulate.cost import collective, gemm
from weft.study.c3.own import KINDS, SIMPLEST, CaseQuestion, ask

SIZE = 64 << 20


@pytest.mark.parametrize("name", ["mi300x", "h100"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_alone_takes_what_its_cost_says(name: str, kind) -> None:
    machine = load(name)
    answer = ask(machine, CaseQuestion(4096, 4096, 4096, kind, SIZE))
    assert answer.gemm == pytest.approx(gemm(machine, 4096, 4096, 4096).seconds, rel=0.02)
    total = 8 * SIZE if kind == "all_gather" else SIZE
    assert answer.ways["cores"] == pytest.approx(collective(machine, kind, total, 8), rel=0.02)
    engines = collective(machine, kind, total, 8, driver="dma", variant="pcpy")
    assert answer.ways["dma"] == pytest.approx(engines, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_no_strategy_is_beyond_ideal_and_serial_is_the_sum(kind) -> None:
    answer = ask(load("mi300x"), CaseQuestion(8192, 8192, 8192, kind, SIZE))
    assert answer.serial == answer.gemm + min(answer.ways.values())
    assert answer.ideal == max(answer.gemm, min(answer.ways.values()))
    assert answer.tried[0].strategy.serial
    for one in answer.tried:
        assert one.seconds >= 0.999 * answer.ideal
        assert one.speedup == pytest.approx(answer.serial / one.seconds)
        assert one.percent_of_ideal <= 100.1
        assert one.gemm_slowdown > 0.99


def test_engines_cannot_add() -> None:
    for kind in KINDS:
        answer = ask(load("h100"), CaseQuestion(4096, 4096, 4096, kind, SIZE))
        names = {one.strategy.base for one in answer.tried}
        adds = kind in ("reduce_scatter", "all_reduce")
        assert ("dma" in answer.refused) == adds
        assert names == set(SIMPLEST) - ({"dma", "dma+trimmed"} if adds else set())


def test_the_answer_is_the_simplest_of_the_best() -> None:
    answer = ask(load("mi300x"), CaseQuestion(8192, 8192, 8192, "all_gather", SIZE))
    quickest = min(one.seconds for one in answer.tried)
    assert answer.use.seconds <= 1.01 * quickest
    assert str(answer.use.strategy) in answer.verdict()
    for one in answer.tried:
        if one.seconds <= 1.01 * quickest:
            assert SIMPLEST.index(answer.use.strategy.base) <= SIMPLEST.index(one.strategy.base)


def test_a_tiny_collective_is_not_worth_it() -> None:
    answer = ask(load("h100"), CaseQuestion(16384, 16384, 16384, "all_reduce", 64))
    assert answer.use.strategy.serial
    assert "one after the other" in answer.verdict()


def test_an_all_reduce_sends_twice_its_vector_unless_the_switch_adds() -> None:
    mesh = CaseQuestion(64, 64, 64, "all_reduce", SIZE).operation(load("mi300x"))
    sent = sum(mesh.num_bytes(0, peer) for peer in range(8))
    assert sent == pytest.approx(2 * 7 / 8 * SIZE, rel=0.01)
    switch = CaseQuestion(64, 64, 64, "all_reduce", SIZE).operation(load("h100"))
    assert sum(switch.num_bytes(0, peer) for peer in range(8)) == pytest.approx(SIZE, rel=0.01)
    assert mesh.total_bytes == switch.total_bytes == SIZE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": 0}, "m must be from 1"),
        ({"k": -3}, "k must be from 1"),
        ({"size": 0}, "size must be from 1"),
        ({"collective": "all_gathr"}, "did you mean all_gather"),
        ({"dtype": "bf16"}, "no dtype 'bf16'"),
        ({"world": 1}, "2 ranks or more"),
    ],
)
def test_bad_questions(change: dict[str, object], words: str) -> None:
    asked = {"m": 64, "n": 64, "k": 64, "collective": "all_gather", "size": 64, **change}
    with pytest.raises(Unsupported, match=words):
        CaseQuestion(**asked)  # type: ignore[arg-type]


def test_more_ranks_than_devices() -> None:
    with pytest.raises(Unsupported, match="has 8 devices"):
        ask(load("h100"), CaseQuestion(64, 64, 64, "all_gather", 64, world=9))
