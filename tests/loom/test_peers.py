"""Peers: symmetric memory, engines, words, and what happens when a rank is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
from loom_ranks import LoomPool

# -- inside the ranks ------------------------------------------------------------------------------


def symmetric_memory():
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    rank, world = dist.get_rank(), dist.get_world_size()
    x = symm.empty(4, 6, dtype=torch.float32, device=torch.device("loom", rank))
    handle = symm.rendezvous(x, dist.group.WORLD)
    again = symm.rendezvous(x, dist.group.WORLD)
    x.fill_(rank)
    handle.barrier()
    peer = (rank + 1) % world
    seen = handle.get_buffer(peer, (4, 6), torch.float32) + 0
    row = handle.get_buffer(peer, (6,), torch.float32, storage_offset=6) + 0
    remote = handle.get_remote_tensor(peer, (4, 6), torch.float32) + 0
    handle.barrier()
    pad = handle.get_signal_pad(rank, (4,), torch.int32)
    words = symm.empty(8, dtype=torch.uint32, device="loom")
    words_handle = symm.rendezvous(words, dist.group.WORLD)
    torch.ops.symm_mem.memset32_(words, 0, 5, 8)
    torch.ops.symm_mem.stream_write_value32_(words, 2, 9)
    torch.accelerator.synchronize()
    dist.barrier()
    theirs = words_handle.get_buffer(peer, (8,), torch.uint32)
    facts = (
        handle.rank,
        handle.world_size,
        handle.buffer_size,
        again.buffer_ptrs == handle.buffer_ptrs,
        pad.cpu().tolist(),
        theirs.to(torch.int64).cpu().tolist(),
        symm.is_symm_mem_tensor(x) if hasattr(symm, "is_symm_mem_tensor") else True,
    )
    good = all(bool((t.cpu() == peer).all()) for t in (seen, row, remote))
    dist.barrier()
    return facts, good


def test_torchs_symmetric_memory(loom_pools):
    for rank, (facts, good) in enumerate(loom_pools(3).run(symmetric_memory)):
        assert good
        assert facts == (rank, 3, 96, True, [0] * 4, [5, 5, 9, 5, 5, 5, 5, 5], True)


def sizes_that_differ():
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(4 + dist.get_rank(), dtype=torch.float32, device="loom")
    try:
        symm.rendezvous(x, dist.group.WORLD)
    except RuntimeError as error:
        return str(error)


def test_blocks_must_be_of_one_size(loom_pools):
    for text in loom_pools(2).run(sizes_that_differ):
        assert "allocate the same size on all ranks" in text


def pitched_copies():
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    from weft.errors import Error
    from weft.loom.driver import LoomDriver

    rank = dist.get_rank()
    x = symm.empty(6, 8, dtype=torch.int32, device="loom")
    handle = symm.rendezvous(x, dist.group.WORLD)
    x.copy_(torch.arange(48).reshape(6, 8) + 100 * rank)
    torch.accelerator.synchronize()
    dist.barrier()
    peer = handle.get_buffer(1 - rank, (6, 8), torch.int32)
    s, driver = torch.Stream("loom"), LoomDriver()
    block = torch.zeros(6, 3, dtype=torch.int32, device="loom")
    s.wait_stream(torch.accelerator.current_stream())
    driver.copy(block, peer[:, 2:5], s)
    torch.accelerator.current_stream().wait_stream(s)
    expected = torch.arange(48).reshape(6, 8)[:, 2:5] + 100 * (1 - rank)
    exact = bool((block.cpu() == expected).all())
    try:
        driver.copy(block, peer[:, ::2][:, :3], s)
        refused = ""
    except Error as error:
        refused = str(error)
    dist.barrier()
    return exact, refused, driver.capturing(s), driver.facts().name


def test_engines_copy_rows_that_are_apart(loom_pools):
    for exact, refused, capturing, name in loom_pools(2).run(pitched_copies):
        assert exact
        assert "items are adjacent" in refused
        assert (capturing, name) == (False, "loom")


def overlapped_copies():
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    import weft.loom
    from weft.loom.driver import LoomDriver

    rank = dist.get_rank()
    x = symm.empty(1 << 18, dtype=torch.float32, device="loom")
    handle = symm.rendezvous(x, dist.group.WORLD)
    x.fill_(rank)
    inbox = torch.empty_like(x)
    torch.accelerator.synchronize()
    dist.barrier()
    weft.loom.load(pace=1e7)  # 1 MiB takes 0.1 s
    weft.loom.clear()
    copies, compute = torch.Stream("loom"), torch.Stream("loom")
    driver = LoomDriver()
    driver.copy(inbox, handle.get_buffer(1 - rank, (1 << 18,), torch.float32), copies)
    driver.sleep(0.05, compute)
    timeline = weft.loom.timeline()
    weft.loom.load()
    dist.barrier()
    return timeline


def test_paced_links_show_overlap_in_a_timeline(loom_pools):
    for rank, timeline in enumerate(loom_pools(2).run(overlapped_copies)):
        assert timeline.communication_seconds(rank) >= 0.1
        assert timeline.overlap_seconds(rank) > 0.03
        assert {s.lane for s in timeline.spans} == {"compute", f"engine of rank {1 - rank}"}


def wait_for_the_other(here):
    """Rank 0 waits on a stream for a word that rank 1 never posts."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    from weft.loom.driver import LoomDriver

    words = symm.empty(4, dtype=torch.int32, device="loom")
    symm.rendezvous(words, dist.group.WORLD)
    words.fill_(0)
    s = torch.Stream("loom")
    torch.accelerator.synchronize()
    if dist.get_rank() == 0:
        LoomDriver().wait(words.data_ptr(), 1, s)
        open(here, "w").close()
        s.synchronize()
    else:
        time.sleep(60)


def test_a_killed_rank_is_an_error_in_seconds(pools, tmp_path):
    pool, here = LoomPool(2), tmp_path / "waiting"
    try:
        job = pool.pool.start(wait_for_the_other, str(here))
        until = time.monotonic() + 60
        while not here.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(pool.pool.pids[1], signal.SIGKILL)
        outcomes = job.outcomes()
    finally:
        pool.close()
    assert outcomes[1].died
    assert "rank 1 has ended while stream" in str(outcomes[0].error)
    assert outcomes[0].at - outcomes[1].at < 5


def meet_alone():
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(4, dtype=torch.float32, device="loom")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    symm.rendezvous(x, dist.group.WORLD)


def test_a_rank_that_never_comes_to_a_rendezvous_is_an_error(pools):
    pool = LoomPool(2)
    try:
        outcomes = pool.pool.outcomes(meet_alone)
    finally:
        pool.close()
    assert "rank 1 has ended before the rendezvous" in str(outcomes[0].error)


def stall_alone():
    import torch

    from weft.loom.driver import LoomDriver
    from weft.loom.library import loaded

    word = torch.zeros(1, dtype=torch.int32, device="loom")
    torch.accelerator.synchronize()
    before = time.monotonic()
    s = torch.Stream("loom")
    LoomDriver().wait(word.data_ptr(), 1, s)
    try:
        s.synchronize()
        said = ""
    except RuntimeError as error:
        said = str(error)
    seconds = time.monotonic() - before
    try:
        torch.ones(1, device="loom")
        after = ""
    except RuntimeError as error:
        after = str(error)
    loaded().calls.loom_clear_failure()
    return said, seconds, after, torch.ones(1, device="loom").item()


def test_a_stalled_stream_is_an_error_in_seconds_and_breaks_the_device(loom_pools):
    said, seconds, after, healed = loom_pools(1).run(stall_alone)[0]
    assert "no rank can go on" in said
    assert "to be at least 1, and it is 0" in said
    assert seconds < 6
    assert "the device has failed" in after
    assert healed == 1.0


def throw_in_a_worker():
    import torch

    from weft.loom.library import loaded

    loaded().calls.loom_inject_failure(b"a unit burnt out")
    x = torch.ones(8, 8, device="loom")
    try:
        x @ x
        torch.accelerator.synchronize()
        said = ""
    except RuntimeError as error:
        said = str(error)
    loaded().calls.loom_clear_failure()
    return said, (torch.ones(2, device="loom") + 1).cpu().tolist()


def test_an_exception_in_a_worker_reaches_the_host(loom_pools):
    said, after = loom_pools(1).run(throw_in_a_worker)[0]
    assert "a unit burnt out" in said
    assert after == [2.0, 2.0]


def wrong_shapes():
    import torch

    found = []
    for call in (
        lambda: torch.ones(2, 3, device="loom") @ torch.ones(4, 5, device="loom"),
        lambda: torch.ones(2, 3, device="loom") + torch.ones(4, device="loom"),
        lambda: torch.ones(2, 3, device="loom").index_select(0, torch.tensor([7]).to("loom")),
        lambda: torch.ones(3, device="loom") + torch.ones(3),
    ):
        try:
            call()
            found.append("")
        except (RuntimeError, IndexError) as error:
            found.append(str(error))
    return found, torch.ones(2, device="loom").sum().item()


def test_a_wrong_call_is_an_error_at_once_and_breaks_nothing(loom_pools):
    found, after = loom_pools(1).run(wrong_shapes)[0]
    assert all(found)
    assert "cannot be multiplied (2x3 and 4x5)" in found[0]
    assert after == 2.0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("rounds", [20])
def test_loading_and_ending_leaves_nothing_behind(library, pools, rounds):
    """More often with WEFT_LOOM_LOADS; 200 times were run for docs/loom.md."""
    rounds = int(os.environ.get("WEFT_LOOM_LOADS", rounds))
    shared, builds = set(os.listdir("/dev/shm")), set(library.parent.glob("tmp*"))
    LoomPool(1).close()
    before, children = open_files(), len(multiprocessing.active_children())
    for _ in range(rounds):
        LoomPool(1).close()
    assert open_files() <= before + 1
    # Others on this machine use the folder too: what counts is what could be loom's.
    fresh = set(os.listdir("/dev/shm")) - shared
    assert [name for name in fresh if "loom" in name or "weft" in name] == []
    assert len(multiprocessing.active_children()) == children
    assert set(library.parent.glob("tmp*")) <= builds
