"""Stream programs that lack one thing: what tests have ranks do to see that it is missed.

A mutant leaves out one wait, post, join or hold on one rank. `listed` names all mutants of a
program, `run` carries out calls that lack one, and the detector says what it thinks of them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from conformance import Case, tensors
from loom_fabric import clear

import weft
from weft.fabric.device import claim_program
from weft.fabric.device import program as programs
from weft.fabric.device.claim_program import ClaimFlight
from weft.fabric.device.flight import DeviceFlight
from weft.loom.library import loaded
from weft.plan.tasks import Copy

SHAPE = (24, 6, 12)
CALLS = 3
"""A part of a slab is used again in the next call but one."""
STALL = 0.25
"""Seconds after which a call that lacks a post is taken to stand still."""

POSTS = ("post", "enter post")


class Mutant(NamedTuple):
    """kind: what is left out. at: the number of a step, stream, peer or turn. item: which of the
    step's, or the name of a buffer."""

    kind: str
    at: int = 0
    item: int | str = 0


class Lacking:
    """What calls lack, and the program of the last one, where tests find it."""

    dropped: Mutant | None = None
    program: programs.DeviceProgram


class _Mutating:
    """A call that lacks what `Lacking.dropped` says."""

    @property
    def dropped(self):
        return Lacking.dropped

    def __init__(self, program, call, tensors, record):
        Lacking.program = program
        self._owner = None
        super().__init__(program, call, tensors, record)

    def _is(self, kind, at) -> bool:
        return self.dropped is not None and self.dropped[:2] == (kind, at)

    def _changed(self, step):
        """The step without what is left out."""
        if self._is("fork", step.number):
            step = replace(step, forked=False)
        for kind, name in (("enter", "enters"), ("event", "events"), ("word", "words")):
            if self._is(kind, step.number):
                items = list(getattr(step, name))
                del items[self.dropped.item]
                step = replace(step, **{name: tuple(items)})
        return step

    def _wait_for(self, step):
        super()._wait_for(self._changed(step))

    def _wait(self, word, stream):
        if self.dropped is not None and self.dropped.kind in ("entry", "meet"):
            fabric, captured = self._fabric, self._call.captured
            turn = self.dropped.item if captured else 0
            if word == fabric.meeting_word(fabric.rank, self.dropped.at, captured, turn):
                if captured:
                    self._driver.post(word, 0, stream)
                return
        super()._wait(word, stream)

    def _join(self, lanes):
        super()._join([lane for lane in lanes if not self._is("join", lane)])

    def _begin(self):
        super()._begin()
        if self._is("hold", 0):
            name = self.dropped.item
            self._owner, self._tensors[name] = _borrowed(self._tensors[name])

    def _copy(self, step):
        super()._copy(step)
        if self._is("hold", 0) and _touches(step.task, self.dropped.item):
            self._owner = None  # nothing holds the memory from here on


class MutantFlight(_Mutating, DeviceFlight):
    """A call whose waits are those of streams."""


class MutantClaims(_Mutating, ClaimFlight):
    """A call whose kernel waits for the words of chunks."""

    def _copy(self, step):
        if self._is("arrival", step.number):  # said to have arrived before it is copied
            self._wait_for(step)
            self._arrived(self._program.arrivals[step.task.id], step)
        super()._copy(step)


def _borrowed(tensor):
    """A tensor, and one of the same memory that does not hold it."""
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    view.set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor, view


def _touches(task, name) -> bool:
    return any(region.buffer == name for region in (*task.reads(), *task.writes()))


class WithoutPost:
    """A driver that leaves out the posts of one word."""

    def __init__(self, driver, word, values):
        self._driver, self._word, self._values = driver, word, values

    def __getattr__(self, name):
        return getattr(self._driver, name)

    def post(self, word, value, stream):
        if word != self._word or value not in self._values:
            self._driver.post(word, value, stream)


# -- in a rank -------------------------------------------------------------------------------------

_prepared: dict = {}


class Prepared:
    """One call of an operator with a schedule, made once so that it is known."""

    def __init__(self, name, schedule):
        case = _case(name)
        self.want = [tensor.float() for tensor in tensors(case.plain())]
        self.function, self.schedule = case.operator.function, schedule
        self.example = case.example.map(lambda tensor: tensor.to("loom"))
        self.fabric = weft.fabric.of(None, "loom")
        with _flights():
            self.call()
        self.program = Lacking.program

    def call(self):
        with torch.device("loom"):
            return self.example.call(self.function, schedule=self.schedule)

    def exact(self, result, used=()) -> bool:
        found = [*(t.cpu() for t in tensors(result)), *(t.cpu() - 1 for t in used)]
        return all(map(torch.equal, found, self.want * (1 + bool(used))))


def _case(name) -> Case:
    particular = {"batch": 13, "max_tables": 2} if name.startswith("embedding") else {}
    case = Case(name.split("/")[0], 5, shape=SHAPE, sizes=(7, 9), particular=particular)
    if name == ONE_WAY:  # rank 0 is sent nothing, and reads nothing of its peers
        rank, world = dist.get_rank(), dist.get_world_size()
        splits = [[4] * world] + [[0] + [4] * (world - 1) for _ in range(world - 1)]
        sent, taken = splits[rank], [row[rank] for row in splits]
        x, w, *_ = case.example.arguments
        x = x[:1].repeat(sum(sent), 1)
        case.example = type(case.example)((x, w, sent, taken))
    return case


ONE_WAY = "all_to_all_matmul/one way"


@contextlib.contextmanager
def _flights(mutant=None):
    programs.DeviceFlight, claim_program.ClaimFlight = MutantFlight, MutantClaims
    Lacking.dropped = mutant
    try:
        yield
    finally:
        programs.DeviceFlight, claim_program.ClaimFlight = DeviceFlight, ClaimFlight
        Lacking.dropped = None


def _prepare(name, schedule) -> Prepared:
    if (name, schedule) not in _prepared:
        _prepared[name, schedule] = Prepared(name, schedule)
    return _prepared[name, schedule]


def listed(name, schedule, captured=False) -> list[Mutant]:
    """Everything that can be left out of this rank's part of a call. captured: what only captured
    calls have, and their words; the rest is the same."""
    program = _prepare(name, schedule).program
    steps, peers, found = program.steps, program.fabric.peers, []
    arrivals = getattr(program, "arrivals", {})
    if not program.computes:  # its kernel waits, and not the stream
        steps = [step for step in steps if step.stream]
        found += [Mutant("arrival", step.number) for step in steps if step.task.id in arrivals]
    for step in steps:
        found += [Mutant("word", step.number, item) for item in range(len(step.words))]
    if captured:
        found += [Mutant("meet", peer, turn) for peer in peers for turn in (0, 1)]
        found += [Mutant("reset", -1 - turn, peer) for peer in peers for turn in (0, 1)]
        found += [Mutant("reset", 0, word) for word in arrivals.values()]
        return found + [Mutant("reset", 0, word) for step in steps for word in step.words]
    for step in steps:
        events = [i for i, e in enumerate(step.events) if not _paces(steps, step, e)]
        found += [Mutant("event", step.number, item) for item in events]
        found += [Mutant("enter", step.number, item) for item in range(len(step.enters))]
        found += [Mutant("post", step.number, item) for item in range(len(step.posts))]
    found += [Mutant("fork", step.number) for step in steps if step.forked]
    found += [Mutant("join", lane) for lane in program.joins]
    found += [Mutant("entry", peer) for peer in program.strangers]
    # A peer that waits for words of this rank needs its entry only to read its inputs; otherwise
    # the post is for calls that the peer refuses.
    reads = any(buffer.kind in ("input", "inplace") for buffer in program.shared)
    posted = {there for step in steps for there, _ in step.posts}
    found += [Mutant("enter post", peer) for peer in peers if reads or peer not in posted]
    moved = [step.task for step in steps if step.stream]
    for buffer in program.private:
        if any(_touches(task, buffer.name) for task in moved):
            found.append(Mutant("hold", 0, buffer.name))
    return found


def _paces(steps, step, event) -> bool:
    """Whether a wait only keeps copies of two lanes apart, as one-peer-at-a-time schedules do: the
    copies touch different memory, and the lane has waited for the fork before."""
    one, other = step.task, steps[event].task
    if not (isinstance(one, Copy) and isinstance(other, Copy)):
        return False
    if not any(before.stream == step.stream for before in steps[: step.number]):
        return False
    return not _meet(one.target, other.target) and not _meet(one.source, other.target)


def _meet(a, b) -> bool:
    """Whether two regions share an element."""
    return (
        a.key == b.key
        and a.row < b.row + b.rows
        and b.row < a.row + a.rows
        and a.column < b.column + b.columns
        and b.column < a.column + a.columns
    )


def captured_call(function):
    """A graph of what a function enqueues, and what the function returned."""
    graph, stream = torch.accelerator.Graph(), torch.Stream("loom")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream, graph:
        result = function()
    return graph, result


def run(name, schedule, mutant=None, on_rank=-1, mode="late", captured=False) -> bool:
    """Calls, of which those of one rank lack something: whether results were exact. The log of
    the detector has these calls alone."""
    prepared = _prepare(name, schedule)
    fabric, exact = prepared.fabric, True
    graph = result = used = None
    clear(mode)
    own = mutant if dist.get_rank() == on_rank else None
    driver = fabric.driver
    if own is not None and own.kind == "reset":
        fabric.driver = WithoutPost(driver, _reset_word(fabric, own), (0,))
    # A run that lacks something may fail in any way: what counts is what the detector says.
    with contextlib.suppress(Exception) if mutant else contextlib.nullcontext():
        with _flights(own):
            if captured:
                graph, result = captured_call(prepared.call)
            for _ in range(CALLS):
                if graph is not None:
                    graph.replay()
                else:
                    result = prepared.call()
                used = [tensor + 1 for tensor in tensors(result)]  # as callers do, on their stream
        torch.accelerator.synchronize()
        exact = prepared.exact(result, used)
    fabric.driver = driver
    with contextlib.suppress(RuntimeError):  # of a device that stood still
        torch.accelerator.synchronize()
    dist.barrier()
    loaded().calls.loom_clear_failure()
    if graph is not None:
        result = used = None
        graph.reset()
        for word in fabric.captured_words(prepared.program.num_words):
            driver.release(word, 0)
    return exact


def _reset_word(fabric, mutant):
    if mutant.at < 0:
        return fabric.meeting_word(fabric.rank, mutant.item, True, -1 - mutant.at)
    return fabric.word(fabric.rank, mutant.item, True)


def stalls(name, schedule, mutant, on_rank) -> bool:
    """One call without a post of one rank. Whether it stands still until the word is written by
    hand, and then ends with the right result."""
    prepared = _prepare(name, schedule)
    fabric, rank = prepared.fabric, dist.get_rank()
    clear("eager")
    target = [None]
    if rank == on_rank:
        if mutant.kind == "post":
            there, word = prepared.program.steps[mutant.at].posts[mutant.item]
        else:
            there, word = mutant.at, -1
        target = [(there, word)]
    dist.broadcast_object_list(target, src=on_rank)
    there, word = target[0]
    driver = fabric.driver

    def address(owner):
        if word < 0:
            return fabric.meeting_word(owner, on_rank)
        return fabric.word(owner, word, False)

    if rank == on_rank:
        fabric.driver = WithoutPost(driver, address(there), range(1 << 32))
    with _flights():
        result = prepared.call()
    fabric.driver = driver
    stands = False
    if rank == there:
        time.sleep(STALL)
        ended = torch.accelerator.current_stream().record_event()
        stands = not ended.query() and driver.read(address(rank)) < fabric.number
        driver.release(address(rank), fabric.number)
    torch.accelerator.synchronize()
    assert prepared.exact(result), (name, schedule, mutant)
    dist.barrier()
    return stands
