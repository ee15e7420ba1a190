"""`schedule="auto"` on real ranks: they agree whatever differs between them, with exact results."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import check_call

import weft
from weft.fabric import VERSION, of
from weft.machine import load
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.run import session as sessions
from weft.schedule import Schedule
from weft.select import auto, store
from weft.select.guard import CALLS, MOST_CALLS, TURNS
from weft.select.heuristic import Choice


def call(m: int = 24, n: int = 8, k: int = 16, schedule: str = "auto") -> tuple[str, str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(m * k, dtype=torch.float32).reshape(m, k) % 7
    w = torch.arange(k * n, dtype=torch.float32).reshape(k, n) % 5
    y = weft.all_gather_matmul(whole.tensor_split(world)[rank], w, schedule=schedule)
    assert torch.equal(y, whole @ w)
    said = weft.explain()
    return said.schedule, said.why


def several(calls: int, m: int = 24) -> list[tuple[str, str]]:
    return [call(m) for _ in range(calls)]


def agree(answers) -> list:
    for answer in answers[1:]:
        assert answer == answers[0]
    return answers[0]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_in_every_call_and_explain_the_same(ranks, world):
    said = agree(ranks(world).run(several, MOST_CALLS + 2))
    assert all(why for _, why in said)


def test_uneven_shards_agree(ranks):
    agree(ranks(3).run(several, 3, 25))
    agree(ranks(3).run(several, 3, 2))


def _the_default() -> tuple[str, str]:
    unpaced, _ = call(12, 4, 8)
    group = dist.new_group()
    weft.configure(group=group, link="10GB/s")
    check_call(12, 4, 8, group=group)
    return unpaced, weft.explain().schedule


def test_the_default_schedule_fits_the_links(ranks):
    first, second = ranks(2).run(_the_default)
    assert first == second
    assert first[0] == "adaptive@direct"  # at memory speed a copy would only cost


def _at_odds(m: int) -> list[tuple[str, str]]:
    """Ranks that would all choose otherwise: another description, another mode, other results."""
    fabric = of(None)
    memory = auto.of(sessions.of(fabric))
    memory.forget()
    if fabric.rank != 0:
        memory.mode = "model"
        os.environ["XDG_CACHE_HOME"] = "/nonexistent"
        memory.guards[("anything",)] = None
    time.sleep(0.05 * fabric.rank)
    return several(MOST_CALLS + 1, m)


def test_ranks_that_would_choose_otherwise_run_what_rank_0_chose(fresh_ranks):
    agree(fresh_ranks(3).run(_at_odds, 96))


def _force(seconds: dict[str, float]) -> list[tuple[str, str]]:
    """Has rank 0 choose adaptive, and its guard hear of times of our own."""
    fabric = of(None)
    memory = auto.of(sessions.of(fabric))
    call(40)
    if fabric.rank == 0:
        from weft.select.guard import Guard

        choice = Choice(Schedule.parse("adaptive@dma"), "forced by a test")
        (key,) = [key for key in memory.guards if key[1][0] == 20]
        memory._settled.clear()
        guard = memory.guards[key] = Guard(choice)
        hear = guard.observe
        guard.observe = lambda _: hear(seconds[guard.next.schedule.base])  # type: ignore
    return [call(40) for _ in range(2 * TURNS * CALLS + 3)]


def test_all_ranks_fall_back_to_serial_at_the_same_call(fresh_ranks):
    said = agree(fresh_ranks(2).run(_force, {"adaptive": 2.0, "serial": 1.0}))
    ran = [schedule for schedule, _ in said]
    assert ran == (["adaptive@dma"] * CALLS + ["serial@dma"] * CALLS) * TURNS + ["serial@dma"] * 3
    assert "measured slower here than serial" in said[-1][1]


def test_all_ranks_keep_what_is_measured_faster(fresh_ranks):
    said = agree(fresh_ranks(2).run(_force, {"adaptive": 1.0, "serial": 2.0}))
    assert [schedule for schedule, _ in said[-3:]] == ["adaptive@dma"] * 3
    assert said[-1][1] == "forced by a test"


def _tuned(m: int) -> tuple[dict[str, str], list[tuple[str, str]]]:
    found = weft.tune(lambda: call(m), repeat=1)
    return found, several(2, m)


def test_tune_keeps_what_auto_then_uses(fresh_ranks, tmp_path):
    pool = fresh_ranks(2, XDG_CACHE_HOME=str(tmp_path))
    found, said = agree(pool.run(_tuned, 32))
    assert list(found) == ["all_gather_matmul 32x8x16 float32 on 2 ranks"]
    assert {schedule for schedule, _ in said} == set(found.values())
    assert all("tuned here" in why for _, why in said)
    assert len(list((tmp_path / "weft" / "tuned").glob("*.json"))) == 1
    again = fresh_ranks(2, XDG_CACHE_HOME=str(tmp_path))
    assert agree(again.run(several, 1, 32)) == said[:1]


def _corrupt() -> tuple[int, tuple[str, str]]:
    import warnings

    operation = AllGatherMatmul.of(48, 8, 16, 2)
    asked = store.question(operation, "memory", VERSION)
    if dist.get_rank() == 0:
        asked.path.parent.mkdir(parents=True, exist_ok=True)
        asked.path.write_text("{ torn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        said = call(48)
    return sum("does not hold" in str(w.message) for w in seen), said


def test_a_corrupt_tuned_result_is_no_reason_to_fail(fresh_ranks, tmp_path):
    pool = fresh_ranks(2, XDG_CACHE_HOME=str(tmp_path))
    (warned, first), (other, second) = pool.run(_corrupt)
    assert (warned, other) == (1, 0)
    assert first == second
    assert "by the rule" in first[1]


def test_the_environment_overrides(fresh_ranks):
    said = agree(fresh_ranks(2, WEFT_SCHEDULE="hetero-fused-1d@cores").run(several, 2))
    assert said == [("hetero-fused-1d@cores", "WEFT_SCHEDULE is set")] * 2


def _one_asks() -> str:
    schedule = "auto" if dist.get_rank() == 0 else "serial"
    with pytest.raises(weft.Mismatch) as refused:
        call(schedule=schedule)
    return str(refused.value)


def test_auto_on_one_rank_and_a_name_on_another_is_a_mismatch(fresh_ranks):
    pool = fresh_ranks(2)
    agree(pool.run(_one_asks))
    agree(pool.run(several, 1))
    assert "the schedule is auto on rank 0 and serial@dma on rank 1" in agree(pool.run(_one_asks))


def _modes() -> list[str]:
    said = []
    for mode in ("model", "heuristic", "auto"):
        weft.configure(select=mode)
        said.append(call(56)[1])
    with pytest.raises(weft.Unsupported, match="did you mean model"):
        weft.configure(select="modle")
    return said


def test_modes(fresh_ranks):
    model, heuristic, auto_mode = agree(fresh_ranks(2, WEFT_GUARD="0").run(_modes))
    assert model.startswith("simulated")
    assert heuristic.startswith("by the rule")
    assert auto_mode.startswith("by the rule")


def _calibrating(threads: int = 1) -> tuple[bool, tuple[str, str]]:
    from weft.machine import calibrated

    torch.set_num_threads(threads)
    return calibrated.path(calibrated.name(threads)).exists(), call(64)


def test_the_first_auto_call_calibrates_and_later_processes_find_it(fresh_ranks, tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "WEFT_CALIBRATE": "1"}
    first = fresh_ranks(2, **environment).run(_calibrating)
    assert not any(before for before, _ in first)
    assert first[0][1] == first[1][1]
    path = tmp_path / "weft" / "machines" / "cpu.toml"
    kept, written = path.read_text(), path.stat().st_mtime_ns
    second = fresh_ranks(2, **environment).run(_calibrating)
    assert all(before for before, _ in second)
    assert path.read_text() == kept
    assert path.stat().st_mtime_ns == written, "nobody measured again"


def test_ranks_of_two_threads_calibrate_for_themselves(fresh_ranks, tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "WEFT_CALIBRATE": "1"}
    for again in (False, True):
        found = fresh_ranks(2, **environment).run(_calibrating, 2)
        assert [before for before, _ in found] == [again, again]
    (path,) = (tmp_path / "weft" / "machines").iterdir()
    assert path.name == "cpu-2-threads.toml"
    machine = load(path)
    assert machine.host is not None
    assert machine.host.threads == 2
