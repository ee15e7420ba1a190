"""One call on the streams of a device: it is enqueued here, and runs later.

A call forks from the caller's stream and joins it again, so for the caller it is one operation of
that stream. The host waits for nothing.

    caller   stage inputs, post "entered" to all peers, ... compute ..., join the lanes
    lanes    wait for the fork, wait for words of peers, copy, post words to peers

Eager words hold the number of the call, so nothing is reset. A captured call is replayed with the
same numbers, so its words are 1 and whoever waits for one sets it back to 0. Two rounds with all
peers begin a captured call: no peer posts a word again before it has been set back (see `_meet`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from weft.fabric.device.device_driver import AT_LEAST, EQUAL
from weft.fabric.device.symmetric import CAPTURED
from weft.fabric.spans import span_of
from weft.plan.tasks import AnyTask, Copy, Region
from weft.timeline import Timeline

if TYPE_CHECKING:
    from weft.fabric.device.device_call import DeviceCall
    from weft.fabric.device.program import DeviceProgram, Step

_NOTHING = Timeline(())


class DeviceFlight:
    """Implements `weft.fabric.interface.StepFlight`."""

    paced = False

    def __init__(
        self,
        program: DeviceProgram,
        call: DeviceCall,
        tensors: dict[str, torch.Tensor],
        record: bool,
    ) -> None:
        fabric = program.fabric
        self._program, self._fabric, self._driver = program, fabric, fabric.driver
        self._call, self._tensors = call, tensors
        self._part = CAPTURED if call.captured else call.number % 2
        self._streams: dict[int, torch.Stream] = {0: call.stream}
        self._events: dict[int, torch.Event] = {}
        self._at = 0
        self._spans: list[tuple[AnyTask, torch.Event, torch.Event]] = []
        self._record = record and not call.captured
        self._began: torch.Event | None = None
        self._base = self._event(call.stream) if self._record else None
        self._begin()

    # -- the beginning -----------------------------------------------------------------------------

    def _begin(self) -> None:
        program, fabric, call = self._program, self._fabric, self._call
        for buffer in program.private:
            dtype = getattr(torch, buffer.dtype)
            self._tensors[buffer.name] = torch.empty(
                buffer.rows, buffer.columns, dtype=dtype, device=fabric.device
            )
        if call.captured:
            self._meet(0)
        for buffer in program.shared:
            here = program.base(self._part, buffer)
            if buffer.kind in ("input", "inplace"):
                here.copy_(self._tensors[buffer.name].view(buffer.rows, buffer.columns))
        if call.captured:
            self._meet(1)
        else:
            call.enter()
        self._fork = call.stream.record_event()

    def _meet(self, turn: int) -> None:
        """One of two rounds in which a captured call waits for all peers. A peer posts the first
        word of its next replay after it has ended this one, which includes the second round; and
        this rank takes part in the second round only after it has reset the first word. So no
        post is lost, and after the first round no peer still reads the last replay's data."""
        fabric, stream, driver = self._fabric, self._call.stream, self._driver
        peers = fabric.peers
        for peer in peers:
            driver.post(fabric.meeting_word(peer, fabric.rank, True, turn), 1, stream)
        for peer in peers:
            self._wait(fabric.meeting_word(fabric.rank, peer, True, turn), stream)

    def _wait(self, word: int, stream: torch.Stream) -> None:
        if self._call.captured:
            self._driver.wait(word, 1, stream, EQUAL)
            self._driver.post(word, 0, stream)
        else:
            self._driver.wait(word, self._call.number, stream, AT_LEAST)

    # -- tasks -------------------------------------------------------------------------------------

    def view(self, region: Region) -> torch.Tensor:
        if region.buffer in self._program.offsets:
            return self._program.shared_view(self._part, region)
        return cut(self._tensors[region.buffer], region)

    def before(self, task: AnyTask) -> None:
        """Enqueues every step up to this task of the compute lane, and what the task waits for."""
        steps = self._program.steps
        while steps[self._at].task.id != task.id:
            self._copy(steps[self._at])
            self._at += 1
        self._wait_for(steps[self._at])
        if self._record:
            self._began = self._event(self._call.stream)

    def after(self, task: AnyTask) -> None:
        step = self._program.steps[self._at]
        self._at += 1
        if self._began is not None:
            self._spans.append((task, self._began, self._event(self._call.stream)))
        self._end_of(step)

    def _copy(self, step: Step) -> None:
        """Enqueues a copy on the stream of its lane."""
        task, stream = step.task, self._stream(step.stream)
        assert isinstance(task, Copy)
        self._wait_for(step)
        began = self._event(stream) if self._record else None
        source, target = self.view(task.source), self.view(task.target)
        if task.source.num_elements:
            if task.engine == "cores":
                if source.element_size() == 1:  # there is no product of float8
                    source, target = source.view(torch.uint8), target.view(torch.uint8)
                with stream:
                    torch.mul(source, 1, out=target)  # a kernel, where copy_ might use an engine
            else:
                self._driver.copy(target, source, stream)
        if began is not None:
            self._spans.append((task, began, self._event(stream)))
        self._end_of(step)

    def _stream(self, number: int) -> torch.Stream:
        """The stream of a lane."""
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = self._fabric.lane(number, self._call.captured)
        return stream

    def _wait_for(self, step: Step) -> None:
        stream = self._stream(step.stream)
        if step.forked:
            stream.wait_event(self._fork)
        if not self._call.captured:  # a captured call has met its peers already
            for peer in step.enters:
                self._wait(self._fabric.meeting_word(self._fabric.rank, peer), stream)
        for other in step.events:
            stream.wait_event(self._events[other])
        for word in step.words:
            self._wait(self._fabric.word(self._fabric.rank, word, self._call.captured), stream)

    def _end_of(self, step: Step) -> None:
        stream = self._streams[step.stream]
        for rank, word in step.posts:
            value = 1 if self._call.captured else self._call.number
            address = self._fabric.word(rank, word, self._call.captured)
            self._driver.post(address, value, stream)
        # The posts are part of the step: whoever waits for the last step of a lane knows that no
        # post of this call comes after those of the next one.
        if step.recorded:
            self._events[step.number] = stream.record_event()

    def _event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self._fabric.device, enable_timing=True)
        event.record(stream)
        return event

    # -- what a host would decide ------------------------------------------------------------------

    def touched(self, task: AnyTask, since: int) -> None:
        """Does nothing: the links of a device have their own speed."""

    def ran(self, task: AnyTask, start: int, end: int) -> None:
        """Does nothing: events on the streams record when a task ran."""

    def ready(self, tasks: object) -> list[bool]:
        raise AssertionError("the tasks of a device are in a fixed order")

    def wait_any(self, waiting: AnyTask) -> None:
        raise AssertionError("the tasks of a device are in a fixed order")

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> DeviceFlight:
        steps, call = self._program.steps, self._call
        while self._at < len(steps):
            self._copy(steps[self._at])
            self._at += 1
        self._join(self._program.joins)
        if not call.captured:
            # Every rank waits for all peers in every call. So in the next call but one, nobody
            # still reads what this rank writes over.
            for peer in self._program.strangers:
                self._wait(self._fabric.meeting_word(self._fabric.rank, peer), call.stream)
        for buffer in self._program.shared:
            if buffer.kind in ("output", "inplace"):
                made = self._program.base(self._part, buffer)
                self._tensors[buffer.name].view(buffer.rows, buffer.columns).copy_(made)
        call.issued(self._program)
        return self

    def cancel(self) -> None:
        """Joins what was enqueued. The group is given up, so all waits are released."""
        self._join(number for number in self._streams if number)

    def _join(self, lanes: Iterable[int]) -> None:
        """The caller's stream goes on when these lanes have ended."""
        for lane in lanes:
            self._call.stream.wait_event(self._streams[lane].record_event())

    # -- completion --------------------------------------------------------------------------------

    def wait(self) -> None:
        self._call.stream.synchronize()

    def timeline(self) -> Timeline:
        if self._base is None:
            return _NOTHING
        self.wait()
        base, origin = self._base, self._fabric.clock(self._base)

        def moment(event: torch.Event) -> int:
            return origin + int(base.elapsed_time(event) * 1e6)

        spans = [
            span_of(self._program.plan, task, task.rank, task.lane, moment(began), moment(ended))
            for task, began, ended in self._spans
        ]
        return Timeline(tuple(spans), self._program.label)


def cut(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of the tensor of its buffer."""
    rows = slice(region.row, region.row + region.rows)
    return whole[rows, region.column : region.column + region.columns]
