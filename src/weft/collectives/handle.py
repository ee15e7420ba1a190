"""A collective that runs in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch._compile import _disable_dynamo
from torch.compiler import is_compiling

from weft.collectives.group_channel import FOREVER, GroupChannel, Job, now_ns
from weft.errors import Error, Timeout
from weft.fabric.deadlines import nanoseconds
from weft.fabric.outcomes import AGAIN, OK
from weft.run.ranges import NOTHING, profiled, range_of

Result = TypeVar("Result")


@_disable_dynamo  # torch.compiler.disable would import the compiler, and that takes a second
def outside_graphs(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Makes a call that torch.compile has met: one graph ends before it, and another begins after
    it."""
    return function(*arguments, **keywords)


class Handle(Generic[Result]):
    """What `async_op=True` returns. Do not write inputs or read outputs before `wait`."""

    def __init__(self, channel: GroupChannel, job: Job, result: Result, name: str) -> None:
        self.channel = channel
        self._job = job
        self._result = result
        self._name = name

    def __repr__(self) -> str:
        return f"<weft.Handle of {self._name}: {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Whether it has ended, with a result or an error; `wait` gives either."""
        if is_compiling():
            return outside_graphs(self.done)  # type: ignore[no-any-return]
        return self._job.done

    def wait(self, timeout: float | None = None) -> Result:
        """Waits for the result. Raises the error of the collective: a lost peer is `PeerLost`.

        After `timeout` seconds, or the group's deadline, it raises `Timeout`. A collective that had
        not begun on this rank is then cancelled on every rank, and the group can still be used. One
        that had begun cannot be cancelled, so the group cannot be used any more.
        """
        if is_compiling():
            return outside_graphs(self.wait, timeout)  # type: ignore[no-any-return]
        with range_of(f"{self._name}.wait") if profiled() else NOTHING:
            return self._wait(timeout)

    def _wait(self, timeout: float | None) -> Result:
        channel, job = self.channel, self._job
        if timeout is None:
            channel.wait(job)
            return self._result
        until = now_ns() + nanoseconds(timeout)
        while True:
            outcome = channel.native.wait(job, min(until, FOREVER))
            if outcome[0] == OK:
                return self._result
            if outcome[0] != AGAIN:
                raise channel.error(job, outcome)
            if now_ns() >= until:
                raise self._late(timeout)

    def cancel(self) -> bool:
        """Cancels the collective if it has not begun on this rank; it then raises `Cancelled` on
        every rank. Returns False, and does nothing, if it has begun or ended."""
        if is_compiling():
            return outside_graphs(self.cancel)  # type: ignore[no-any-return]
        return self.channel.native.withdraw(self._job)

    def _late(self, timeout: float) -> Error:
        rank, name = self.channel.rank, self._name
        waited = f"rank {rank} waited {timeout:g} s for its {name}"
        if self.cancel():
            return Timeout(f"{waited}, which had not begun and is cancelled on every rank")
        late = self.channel.native.late(self._job)
        who = ", ".join(map(str, late))
        missing = (
            f" ({'rank' if len(late) == 1 else 'ranks'} {who} did not make it)" if late else ""
        )
        error = Timeout(f"{waited}{missing}; it had begun, so the group is over: form a new one")
        self.channel.fabric.give_up(error)
        return error
