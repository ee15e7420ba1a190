"""`schedule="auto"` of every operator: the rule is near the simulator where products come first,
and on real ranks all of them agree, with results as exact as those of a named schedule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.fabric import of
from weft.machine import load
from weft.operation import find
from weft.run import session as sessions
from weft.schedule import Schedule
from weft.select import auto, this_host
from weft.select.guard import MOST_CALLS
from weft.select.heuristic import choose, estimates
from weft.simulate import run

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))
from conformance import Case, gradcheck, same
from operators import OPERATORS

NAMES = [name for name in OPERATORS if "matmul" in name]
OTHERS = [name for name in NAMES if name != "all_gather_matmul"]
SIZES = ((2, 512, 1024, 4096), (4, 8192, 2048, 2048), (8, 16384, 4096, 1024))


@pytest.mark.parametrize("machine", ["mi300x", "h100"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_rule_takes_what_schedules_simulate_to(name, machine):
    there = load(machine)
    for world, m, n, k in SIZES:
        operation = find(name).of(m, n, k, world, "bfloat16")
        told = estimates(there, operation)
        for schedule in ("serial@dma", "shard-p2p@dma", "hetero-fused-1d@dma"):
            parsed = Schedule.parse(schedule)
            seconds = run(operation.lower(parsed), there).seconds
            assert told[parsed] == pytest.approx(seconds, rel=0.25), (schedule, operation.label)


@pytest.mark.parametrize("machine", ["mi300x", "h100"])
@pytest.mark.parametrize("name", [*OTHERS, "gather_contract"])
def test_no_choice_is_slower_than_serial(name, machine):
    there = load(machine)
    for world, m, n, k in SIZES:
        operation = find(name).of(m, n, k, world, "bfloat16")
        chosen = choose(there, operation).schedule
        seconds = {
            schedule: run(operation.lower(schedule), there).seconds
            for schedule in {chosen, *map(Schedule.parse, ("serial@dma", "serial@cores"))}
        }
        serial = min(time for schedule, time in seconds.items() if schedule.serial)
        assert seconds[chosen] <= serial * 1.02, (operation.label, chosen)


@pytest.mark.parametrize("name", OTHERS)
def test_few_rows_are_not_cut_fine(name):
    """Every product of few rows reads the whole weight again: that no overlap pays for."""
    machine = this_host.with_link(this_host.default(), weft.Link.parse("1GB/s"))
    chosen = choose(machine, find(name).of(16, 1024, 1024, 2)).schedule
    assert chosen.serial or chosen.engine == "direct" or chosen.depth == 1


def _agree(name: str, calls: int, link: str) -> list[tuple[str, str]]:
    weft.configure(link=link)
    try:
        case, said = Case(name, 21, sizes=(40, 64)), []
        for _ in range(calls):
            same(case, "auto")
            said.append((weft.explain().schedule, weft.explain().why))
        return said
    finally:
        weft.configure(link="memory")


@pytest.mark.parametrize("name", NAMES)
def test_ranks_agree_on_every_operator_until_it_has_settled(ranks, name):
    for world, link in ((2, "0.5GB/s"), (3, "memory")):
        first, *others = ranks(world).run(_agree, name, MOST_CALLS + 2, link)
        assert all(said == first for said in others)
        # At memory speed an all-to-all is made in place, whatever its sizes.
        fixed = name == "matmul_all_to_all" and link == "memory"
        assert first[0][1].startswith("links are as fast" if fixed else "by the rule for")
        assert first[-1] == first[-2]  # settled


def _no_guard(name: str) -> list[str]:
    gradcheck(name, "auto", 5)
    return [weft.explain().schedule]


@pytest.mark.parametrize("name", NAMES[:2])
def test_gradients_choose_too(fresh_ranks, name):
    pool = fresh_ranks(3, WEFT_GUARD="0")
    assert len({tuple(said) for said in pool.run(_no_guard, name)}) == 1


def _routed() -> int:
    """Splits that change from call to call, as a router's do: one guard for those that are near."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = auto.of(sessions.of(of(None)))
    memory.forget()
    w = torch.ones(8, 4)
    for number in range(6):
        sent = [64 + (number + rank + to) % 3 for to in range(world)]
        taken = [64 + (number + source + rank) % 3 for source in range(world)]
        x = torch.full((sum(sent), 8), float(rank))
        y = weft.all_to_all_matmul(x, w, sent, taken)
        told = torch.cat([torch.full((n, 4), 8.0 * s) for s, n in enumerate(taken)])
        assert torch.equal(y, told)
        back = weft.matmul_all_to_all(y, torch.ones(4, 8), taken, sent)
        assert torch.equal(back, x * 32)
    return len(memory.guards)


def test_changing_splits_share_a_choice(ranks):
    # One on rank 0 alone; and one on every rank for the way back, which may be in-kernel.
    assert ranks(2).run(_routed) == [2, 1]


def _tuned() -> dict[str, str]:
    """A training step: its backward gathers along K, where most schedules cannot be."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.ones(24, 8).tensor_split(world)[rank].clone().requires_grad_()
    w = torch.ones(8, 6, requires_grad=True)

    def step() -> None:
        x.grad = w.grad = None
        weft.all_gather_matmul(x, w).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0 * world))
        assert torch.equal(w.grad, torch.full_like(w, 24.0))

    return weft.tune(step, repeat=1)


def test_a_step_with_its_backward_is_tuned(fresh_ranks, tmp_path):
    first, second = fresh_ranks(2, XDG_CACHE_HOME=str(tmp_path)).run(_tuned)
    assert first == second
    assert sorted(label.split()[0] for label in first) == [
        "all_gather_matmul",
        "gather_contract",
        "matmul_reduce_scatter",
    ]


def _environment(name: str) -> str:
    same(Case(name, 3, sizes=(5, 8)), "auto")
    return weft.explain().schedule


def test_the_environment_says_what_auto_is_for_every_operator(fresh_ranks):
    pool = fresh_ranks(2, WEFT_SCHEDULE="serial@cores")
    for name in NAMES:
        assert pool.run(_environment, name) == ["serial@cores"] * 2
