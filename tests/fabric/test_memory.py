"""The heap: symmetric tensors, their life, reuse of memory, forks, and groups made again."""

from __future__ import annotations

import atexit
import gc
import os
import time
import weakref
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ranks import check_call

import weft
from weft import Unsupported, fabric

PAGE = 4096


def allocated(group=None) -> int:
    return fabric.of(group).memory.allocated


def private() -> int:
    """Bytes of heap that exist: pages of the memfd, which come when they are touched."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # one of them was that of the list itself
            if "memfd:weft" in os.readlink(f"/proc/self/fd/{fd}"):
                return os.stat(f"/proc/self/fd/{fd}").st_blocks * 512
    raise AssertionError("there is no heap")


def blocks() -> None:
    native = fabric.of().native
    before = native.allocated
    one, two, three = (native.allocate(size) for size in (1, PAGE, PAGE + 1))
    assert native.allocated - before == PAGE + PAGE + 2 * PAGE
    assert len({one.offset, two.offset, three.offset}) == 3
    assert all(block.offset % PAGE == 0 for block in (one, two, three))
    hole = two.offset
    del two
    again = native.allocate(PAGE)
    assert again.offset == hole, "the first hole that fits is used again"
    del one, again, three
    assert native.allocated == before
    joined = native.allocate(4 * PAGE)
    assert joined.offset <= hole, "holes that touch become one"
    array = joined.array()
    del joined
    assert native.allocated > before, "an array keeps its block"
    array[:] = 3
    del array
    assert native.allocated == before


def test_blocks_are_given_out_and_taken_back(fresh_ranks):
    fresh_ranks(2).run(blocks)  # where holes are depends on all that was there before


def life() -> None:
    before = allocated()
    dist.barrier()  # every rank has opened the heap, and touched what it keeps there itself
    tensor = weft.symmetric_empty(1000, 1000)
    assert tensor.shape == (1000, 1000)
    assert tensor.dtype == torch.float32
    tensor.fill_(3)
    assert private() >= tensor.nbytes
    view = tensor[500:, 3:7].t()
    flat = tensor.view(-1)[:10].numpy()
    del tensor
    gc.collect()
    assert allocated() - before >= 4_000_000
    assert (view == 3).all()
    del view
    assert (flat == 3).all()
    held = private()
    del flat
    gc.collect()
    assert allocated() == before
    dist.barrier()
    left = private()
    assert left < held - 3_900_000, f"the pages have not gone back: {held}, then {left}"
    dist.barrier()
    again = weft.symmetric_empty(1000, 1000)
    assert not again.any(), "memory that went back comes as zeros"


def test_a_symmetric_tensor_lives_as_long_as_any_view(fresh_ranks):
    fresh_ranks(2).run(life)  # nothing that earlier calls left may go back meanwhile


def shapes() -> None:
    assert weft.symmetric_empty(3, 4).shape == (3, 4)
    assert weft.symmetric_empty((3, 4), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert weft.symmetric_empty([5]).shape == (5,)
    assert weft.symmetric_empty(0, 4).shape == (0, 4)
    assert weft.symmetric_empty().shape == ()
    assert weft.symmetric_empty(2, dtype=torch.int64).dtype == torch.int64
    first, second = weft.symmetric_empty(10), weft.symmetric_empty(10)
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all()
    with pytest.raises(Unsupported, match="WEFT_HEAP"):
        weft.symmetric_empty(2**50)
    for beyond in ((2**40, 2**30), (2**64,), (2**70, 2), (2**4000,)):
        with pytest.raises(Unsupported, match=r"set WEFT_HEAP to a larger size$"):
            weft.symmetric_empty(*beyond)  # the example would not be enough
    for wrong in ((3, -1), (2.5,), (3, None), ("3",), ([2, 3.0],)):
        with pytest.raises(Unsupported, match="cannot have the shape"):
            weft.symmetric_empty(*wrong)
    for wrong in ("float32", float, 3, b"float32"):
        with pytest.raises(Unsupported, match="dtype must be one of torch"):
            weft.symmetric_empty(2, dtype=wrong)
    check_call(8, 3, 4)


def test_shapes_of_symmetric_tensors(ranks):
    ranks(2).run(shapes)


def outlive() -> float:
    """A tensor outlives its group: the memory goes when the tensor does."""
    group = dist.new_group()
    tensor = weft.symmetric_empty(100, group=group)
    tensor.fill_(5)
    dist.destroy_process_group(group)
    weft.symmetric_empty(1, group=dist.new_group())  # closes what torch has destroyed
    gc.collect()
    return float(tensor.sum())


def test_a_symmetric_tensor_outlives_its_group(ranks):
    assert ranks(2).run(outlive) == [500.0, 500.0]


def small_heap() -> None:
    with pytest.raises(Unsupported, match=r"cannot hold 4 MiB more; set .*=64GiB$"):
        weft.symmetric_empty(2**20)
    one = weft.symmetric_empty(2**18)
    assert one.numel() == 2**18
    x, w = torch.ones(2**20 // 8, 8), torch.ones(8, 1)
    with pytest.raises(Unsupported, match="WEFT_HEAP"):
        weft.all_gather_matmul(x, w)  # staging does not fit either
    check_call(8, 3, 4)


def test_a_full_heap_is_one_sentence_and_the_group_goes_on(fresh_ranks):
    fresh_ranks(2, WEFT_HEAP="2MiB").run(small_heap)


def one_full_heap() -> None:
    """Only rank 0 cannot stage its input; rank 1 must hear of it, and not read an old header."""
    x, w = torch.ones(2**15, 4), torch.ones(4, 1)  # 512 KiB of 2 MiB
    kept = weft.symmetric_empty(7 * 2**16) if dist.get_rank() == 0 else None
    for _ in range(3):
        check_call(8, 3, 4)
        expected = Unsupported if dist.get_rank() == 0 else weft.Mismatch
        with pytest.raises(expected, match="WEFT_HEAP"):
            weft.all_gather_matmul(x, w)
    check_call(8, 3, 4)
    del kept
    assert weft.all_gather_matmul(x, w).shape == (2**16, 1)


def test_a_full_heap_on_one_rank_is_heard_on_all(fresh_ranks):
    fresh_ranks(2, WEFT_HEAP="2MiB").run(one_full_heap)


def own_environment(rank_heap: list[str]) -> None:
    os.environ["WEFT_HEAP"] = rank_heap[dist.get_rank()]
    for name in ("adaptive@dma", "adaptive@direct"):
        check_call(20, 3, 4, schedule=name)


def test_ranks_with_different_heap_sizes_agree_on_one(fresh_ranks):
    fresh_ranks(3).run(own_environment, ["8MiB", "64MiB", "1000001B"])


def bad_heap_size() -> None:
    with pytest.raises(Unsupported, match="WEFT_HEAP is 'plenty'"):
        weft.symmetric_empty(1)


def test_a_heap_size_that_is_none(fresh_ranks):
    fresh_ranks(1, WEFT_HEAP="plenty").run(bad_heap_size)


# -- forks -----------------------------------------------------------------------------------------


def fork() -> None:
    """A child may use, drop and exit as it likes: its parent's memory and group stay whole."""
    check_call(8, 3, 4, schedule="adaptive@dma")  # starts engines, whose threads a child lacks
    tensor = weft.symmetric_empty(1000)
    tensor.fill_(7)
    dist.barrier()
    for way in ("drop", "exit", "call"):
        child = os.fork()
        if child == 0:
            code = 0
            try:
                if way == "drop":
                    del tensor
                    gc.collect()
                elif way == "call":
                    try:
                        check_call(8, 3, 4)
                        code = 1
                    except Unsupported as refused:
                        code = 0 if "forked" in str(refused) else 2
                else:
                    atexit._run_exitfuncs()  # as an ordinary exit of the interpreter does
                    fabric._open.clear()
                    gc.collect()
            except BaseException:
                code = 3
            os._exit(code)
        until = time.monotonic() + 10
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > until:
                os.kill(child, 9)
                os.waitpid(child, 0)
                raise AssertionError(f"the child that would {way} hangs")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(status) == 0, way
        assert (tensor == 7).all(), way
        check_call(8, 3, 4, schedule="adaptive@dma")


@pytest.mark.parametrize("kind", ["auto", "flat"])
def test_a_forked_child_leaves_its_parent_alone(ranks, kind):
    ranks(2, WEFT_FABRIC=kind).run(fork)


# -- groups made again and again -------------------------------------------------------------------


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def census() -> tuple[int, int]:
    """Threads and file descriptors of this process: the least of several looks, for one that
    has ended is listed a moment longer."""
    looks = []
    for _ in range(20):
        looks.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        time.sleep(0.01)
    return min(threads for threads, _ in looks), min(files for _, files in looks)


def made_again(count: int) -> None:
    after: list[tuple[int, int]] = []
    memory: list[int] = []
    for number in range(count):
        group = dist.new_group()
        check_call(16, 3, 8, group=group, schedule="adaptive@dma")
        dist.destroy_process_group(group)
        del group  # while it lives its sockets do, one until the peer has closed its own
        if number in (count // 2, count - 1):
            gc.collect()
            after.append(census())
            memory.append(resident())
    assert after[0] == after[1], f"threads and file descriptors are not flat: {after}"
    assert memory[1] - memory[0] < 8 * 2**20


def test_groups_made_and_destroyed_fifty_times(fresh_ranks):
    fresh_ranks(2).run(made_again, 50)


def gone_when_destroyed() -> None:
    group = dist.new_group()
    weft.all_gather_matmul(torch.ones(3, 4), torch.ones(4, 5), group=group)
    weft.matmul_all_reduce(torch.ones(1, 64), torch.ones(64, 64), group=group)
    weft.all_reduce(torch.ones(7), group=group)
    with weft.record():
        weft.all_gather_matmul(torch.ones(3, 4), torch.ones(4, 5), group=group)
    weft.explain()
    ref = weakref.ref(group)
    gc.disable()  # what only a collection finds is found when Python ends, too late for gloo
    try:
        dist.destroy_process_group(group)
        del group
        assert ref() is None, "weft keeps a group alive that was destroyed"
    finally:
        gc.enable()


def test_a_destroyed_group_is_gone_at_once(ranks):
    ranks(2).run(gone_when_destroyed)
