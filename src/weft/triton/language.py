"""Communication in the Triton language, over a table with the base of every rank's memory.

Symmetric memory has the same layout on every rank, so a pointer into this rank's part also
identifies the same place in every other part. `bases` points to the table (int64, one base per
rank), and `me` is this rank. The table may come from weft's host heap, torch's symmetric memory, or
elsewhere.

    there = peer(pointer, rank, bases, me)           the same place in another rank's memory
    put(pointer, value, rank, bases, me, mask)       stores there
    value = get(pointer, rank, bases, me, mask)      loads from there
    signal(pointer, value, rank, bases, me)          sets a counter there, after all that was put
    signal_add(pointer, value, rank, bases, me)      adds to it, likewise
    arrived = wait(pointer, target, spins, status, rank, phase)
                                                     until this rank's counter is `target` or more

`signal` and `signal_add` release and `wait` acquires, for the whole system unless `sem` and `scope`
are given; docs/triton.md explains why that is enough.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from weft.triton import interpreting
from weft.triton.jit import kernel

WAITED = tl.constexpr(1)
"""Status: a wait of this rank reached its limit of polls."""
BAD_INDEX = tl.constexpr(2)
"""Status: an index was outside of its table; nothing was read for it."""


@kernel
def peer(pointer, rank, bases, me):
    """The same place in the memory of `rank`; for a scalar pointer or a block of pointers."""
    # Bases are aligned, which the compiler cannot know; vector stores depend on it.
    distance = tl.multiple_of(tl.load(bases + rank) - tl.load(bases + me), 16)
    return (pointer.to(tl.pointer_type(tl.int8)) + distance).to(pointer.dtype)


@kernel
def put(pointer, value, rank, bases, me, mask=None):
    """Stores a value at the same place in the memory of `rank`."""
    tl.store(peer(pointer, rank, bases, me), value, mask=mask)


@kernel
def get(pointer, rank, bases, me, mask=None, other=None):
    """Loads the value at the same place in the memory of `rank`."""
    return tl.load(peer(pointer, rank, bases, me), mask=mask, other=other)


@kernel
def signal(
    pointer,
    value,
    rank,
    bases,
    me,
    sem: tl.constexpr = "release",
    scope: tl.constexpr = "sys",
):
    """Sets the counter of `rank`. A rank that waits for it sees all earlier puts of this
    program."""
    if sem != "relaxed":
        settle()
        tl.debug_barrier()
    tl.atomic_xchg(peer(pointer, rank, bases, me), value, sem=sem, scope=scope)


@kernel
def signal_add(
    pointer,
    value,
    rank,
    bases,
    me,
    sem: tl.constexpr = "release",
    scope: tl.constexpr = "sys",
):
    """Adds to the counter of `rank`. A rank that waits for it sees all earlier puts of this
    program."""
    if sem != "relaxed":
        settle()
        tl.debug_barrier()
    tl.atomic_add(peer(pointer, rank, bases, me), value, sem=sem, scope=scope)


@kernel
def wait(
    pointer,
    target,
    spins,
    status,
    rank,
    phase: tl.constexpr,
    sem: tl.constexpr = "acquire",
    scope: tl.constexpr = "sys",
):
    """Waits until this rank's counter is `target` or more; returns whether it is.

    It gives up after `spins` polls, or when another wait of this rank has given up. `status` then
    holds the rank and the phase of the first such wait. Code that depends on the wait must check
    the result.
    """
    seen = tl.atomic_add(pointer, 0, sem=sem, scope=scope)
    left = spins
    while (seen < target) & (left > 0):
        left = tl.where(tl.load(status, volatile=True) == 0, pause(left), 0)
        seen = tl.atomic_add(pointer, 0, sem=sem, scope=scope)
    if seen < target:
        report(status, WAITED, rank, phase, target, seen.to(tl.int64))
    return seen >= target


@kernel
def report(status, code: tl.constexpr, rank, phase, target, seen):
    """Writes an error into the status words, unless there is one already."""
    if tl.atomic_cas(status, tl.full((), 0, tl.int64), tl.full((), code, tl.int64)) == 0:
        tl.store(status + 1, rank)
        tl.store(status + 2, phase)
        tl.store(status + 3, target)
        tl.store(status + 4, seen)


def pause(left: Any, _semantic: Any = None) -> Any:
    """`left` minus one, after a short pause that leaves the memory system to others. In an
    interpreted kernel it is 0 when the deadline has passed or a peer is lost."""
    if _semantic is None:
        return left - 1 if interpreting.patience() else left * 0
    nap = {"cuda": "nanosleep.u32 128;", "hip": "s_sleep 2"}[_semantic.builder.options.backend_name]
    return tl.core.add(_after(left, nap, _semantic), -1, _semantic=_semantic)


def dot(x: Any, w: Any, sums: Any, precision: Any, _semantic: Any = None) -> Any:
    """`tl.dot` into float32. Interpreted, every element is summed index by index and rounded after
    each step, so its bits do not depend on its place in the tile. Triton's interpreter calls a
    BLAS, whose kernels for some processors sum rows at the end of a block in another way. It also
    multiplies the bits of bfloat16 as if they were whole numbers; here operands are first converted
    to float32, which is exact."""
    if _semantic is None:
        left, right = x.to(tl.float32).handle.data, w.to(tl.float32).handle.data
        total = sums.handle.data.copy()
        for k in range(len(right)):
            total += left[:, k, None] * right[k]
        return tl.core.tensor(TensorHandle(total, tl.float32), sums.type)
    return tl.core.dot(x, w, sums, input_precision=precision, _semantic=_semantic)


def settle(_semantic: Any = None) -> None:
    """Waits until the stores of each thread of the program are visible to the thread that signals.

    NVIDIA's barrier orders the stores of all threads before the release that follows it. AMD's does
    not wait for unfinished stores. So each wave must do so before the barrier, or the release of
    another wave could overtake them.
    """
    if _semantic is None or _semantic.builder.options.backend_name == "cuda":
        return
    zero = tl.core.full((), 0, tl.int32, _semantic=_semantic)
    _after(zero, _drain(_semantic.builder.options.arch), _semantic)


def _drain(arch: str) -> str:
    """The instruction by which a wave waits for its own stores, for each family of GPUs."""
    family = arch.removeprefix("gfx").split(":")[0]
    if family.startswith("12"):
        return "s_wait_storecnt 0x0"
    if family.startswith(("10", "11")):
        return "s_waitcnt vmcnt(0)\ns_waitcnt_vscnt null, 0x0"
    return "s_waitcnt vmcnt(0)"


def _after(value: Any, instruction: str, semantic: Any) -> Any:
    """The value, after an instruction that no memory access may be moved across."""
    cuda = semantic.builder.options.backend_name == "cuda"
    move, register = ("mov.b32 $0, $1;", "r") if cuda else ("v_mov_b32 $0, $1", "v")
    return tl.core.inline_asm_elementwise(
        f"{instruction}\n{move}",
        f"={register},{register},~{{memory}}",
        [value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
        _semantic=semantic,
    )


# Functions of the language: the compiler passes `_semantic`, interpreted code does not.
for _word in (dot, pause, settle):
    setattr(_word, tl.core.TRITON_BUILTIN, True)
