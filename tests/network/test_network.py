"""Over a real network: results, and what becomes of a call when the network or a host fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, integers, product, shard_of, tell

import weft
from weft import fabric
from weft.errors import Mismatch, PeerLost, Timeout, Unsupported
from weft.measure.hosts import INTERFACE, Wire

SHORT = 3.0
"""The deadline of ranks, in seconds, where it is what ends a call."""
IN_TIME = SHORT + 11
MB = 1e6


def _which():
    made = fabric.of()
    return made.can.name, made.reach.members


def _results(schedules):
    for number, schedule in enumerate(schedules):
        check_call(203, 17, 31, seed=number, schedule=schedule)
        x, w = integers((64, 9), torch.float32, number), integers((9, 5), torch.float32, 1)
        y = weft.matmul_reduce_scatter(x, w, schedule=schedule)
        assert torch.equal(y, shard_of(product(x, w) * dist.get_world_size()))
    return weft.explain().schedule


SCHEDULES = ("serial", "uniform-fused-2d", "adaptive:4", "auto")


@pytest.mark.parametrize(("count", "world"), [(4, 4), (2, 4)])
def test_hosts_are_told_apart_and_results_are_right(on_hosts, count, world):
    _, pool = on_hosts(count, world, Wire(rate=50 * MB))
    found = pool.run(_which)
    mates = world // count
    for rank, (name, members) in enumerate(found):
        assert name == "group"
        assert members == list(range(rank - rank % mates, rank - rank % mates + mates))
    pool.run(_results, SCHEDULES)


def test_one_percent_of_packets_is_lost(on_hosts):
    _, pool = on_hosts(2, 2, Wire(rate=100 * MB, loss=0.01))
    pool.run(_results, ("adaptive:4",))
    pool.run(check_call, 4096, 16, 256)


def _long_call():
    """A call that takes a second or two on a slow link."""
    x = torch.ones(2000, 1000)
    tell("calling")
    weft.all_gather_matmul(x, torch.ones(1000, 4), schedule="adaptive@dma")


def _again(port, ranks, rank_of):
    """The ranks that are left form a new group, and it works."""
    dist.destroy_process_group()
    rank = ranks.index(rank_of)
    store = dist.TCPStore("10.77.0.1", port, None, rank == 0, timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ranks))
    check_call(67, 5, 7, schedule="adaptive:3@dma")


def _form_anew(pool, ranks):
    jobs = [pool.start(_again, 29600, ranks, rank, only=[rank]) for rank in ranks]
    for job in jobs:
        (outcome,) = job.outcomes()
        assert outcome.error is None, outcome.trace


def test_a_host_is_killed(on_hosts):
    _, pool = on_hosts(3, 3, Wire(rate=10 * MB))
    pool.run(check_call, 8, 4, 4)
    job = pool.start(_long_call)
    job.hear("calling")
    time.sleep(0.3)
    moment = pool.kill(2)
    outcomes = job.outcomes()
    for rank in (0, 1):
        assert isinstance(outcomes[rank].error, PeerLost), outcomes[rank].trace
        assert "rank 2" in str(outcomes[rank].error)
        assert outcomes[rank].at - moment < 5.0
    _form_anew(pool, [0, 1])


def test_a_link_goes_down(on_hosts):
    hosts, pool = on_hosts(3, 3, Wire(rate=10 * MB), WEFT_DEADLINE=str(SHORT))
    pool.run(check_call, 8, 4, 4)
    job = pool.start(_long_call)
    job.hear("calling")
    time.sleep(0.3)
    hosts.unplug(2)
    moment = time.monotonic()
    for rank, outcome in enumerate(job.outcomes()):
        assert isinstance(outcome.error, (Timeout, PeerLost)), (rank, outcome.trace)
        assert outcome.at - moment < IN_TIME
    hosts.plug(2)
    _form_anew(pool, [0, 1, 2])


def _disagree():
    rank = dist.get_rank()
    weft.all_gather_matmul(torch.ones(4, 3 + rank), torch.ones(3 + rank, 2))


def test_ranks_that_disagree_all_hear_it_and_go_on(on_hosts):
    _, pool = on_hosts(2, 2)
    for outcomes in (pool.outcomes(_disagree), pool.outcomes(_bad_input)):
        first, second = (outcome.error for outcome in outcomes)
        assert isinstance(first, weft.Error)
        assert isinstance(second, weft.Error)
    outcomes = pool.outcomes(_disagree)
    assert all(isinstance(outcome.error, Mismatch) for outcome in outcomes)
    assert len({str(outcome.error) for outcome in outcomes}) == 1
    pool.run(check_call, 67, 5, 7)
    for function, said in (
        (_direct, "adaptive@dma"),
        (_in_kernel, "in-kernel"),
        (_collective, "several machines"),
        (_tuned, "one machine"),
    ):
        for outcome in pool.outcomes(function):
            assert isinstance(outcome.error, Unsupported), outcome.trace
            assert said in str(outcome.error)
        pool.run(check_call, 67, 5, 7)


def _bad_input():
    dtype = torch.int32 if dist.get_rank() else torch.float32
    weft.all_gather_matmul(torch.ones(4, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype))


def _collective():
    weft.all_reduce(torch.ones(3))


def _tuned():
    weft.tune(lambda: check_call(8, 4, 4))


def _in_kernel():
    weft.all_gather_matmul(torch.ones(4, 3), torch.ones(3, 2), schedule="in-kernel")


def _direct():
    weft.all_gather_matmul(torch.ones(4, 3), torch.ones(3, 2), schedule="adaptive@direct")


def _mixed():
    os.environ["WEFT_FABRIC"] = "flat" if dist.get_rank() else "group"
    try:
        check_call(8, 4, 4)
    finally:
        del os.environ["WEFT_FABRIC"]


def _old():
    from weft.fabric import _native, rendezvous

    class Old:
        VERSION = "0.0.1"

    rendezvous._native = Old if dist.get_rank() else _native
    try:
        check_call(8, 4, 4)
    finally:
        rendezvous._native = _native


def _no_path():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["WEFT_DEADLINE"] = "1"  # which this takes
    check_call(8, 4, 4)


def test_what_cannot_work_is_said_on_every_rank(on_hosts):
    _, pool = on_hosts(2, 2, WEFT_DEADLINE=str(SHORT))
    for function, said in (
        (_mixed, "one fabric"),
        (_old, "0.0.1"),
        (_no_path, "over the network"),
    ):
        started = time.monotonic()
        for outcome in pool.outcomes(function):
            assert isinstance(outcome.error, Unsupported), outcome.trace
            assert said in str(outcome.error)
            assert outcome.at - started < IN_TIME


SCRIPT = """
import torch, torch.distributed as dist, weft
dist.init_process_group("gloo")
y = weft.all_gather_matmul(torch.ones(50, 8), torch.ones(8, 3))
assert torch.equal(y, torch.full((200, 3), 8.0))
print(f"{weft.fabric.of().can.name} {dist.get_rank()}")  # one word, for ranks share the pipe
dist.destroy_process_group()
"""


def test_torchrun(on_hosts, tmp_path):
    hosts, _ = on_hosts(2, 0)
    (tmp_path / "program.py").write_text(SCRIPT)
    processes = []
    for host in range(2):
        place = hosts.place(host)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", "2", "--node-rank", str(host), "--master-addr"]
        command += [hosts.address(0), "--master-port", "29700", "-m", "program"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment,
                preexec_fn=place.enter,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    # Lines of two ranks may come as one.
    assert [sorted(re.findall(r"group (\d)", text)) for text in said] == [
        ["0", "1"],
        ["2", "3"],
    ]
