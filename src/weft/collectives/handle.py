"""A collective that is under way in the background."""

from __future__ import annotations

from typing import Generic, TypeVar

from weft.collectives.channel import FOREVER, Channel
from weft.errors import Error, Timeout
from weft.fabric import _native
from weft.fabric.outcomes import AGAIN, OK

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """What `async_op=True` gives. Inputs must not be written, nor outputs read, before `wait`."""

    def __init__(self, channel: Channel, job: _native.Job, result: Result, name: str) -> None:
        self.channel = channel
        self._job = job
        self._result = result
        self._name = name

    def __repr__(self) -> str:
        return f"<weft.Handle of {self._name}: {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Whether it is over, well or not; `wait` says which."""
        return self._job.done

    def wait(self, timeout: float | None = None) -> Result:
        """The result, once it is there. Raises what went wrong: a lost peer is `PeerLost`.

        After `timeout` seconds, or the group's deadline, it is `Timeout`. A collective that had not
        begun here is then cancelled on every rank, and the group lives on; one that had begun
        cannot be taken back, so the group is over.
        """
        channel, job = self.channel, self._job
        if timeout is None:
            channel.wait(job)
            return self._result
        until = _native.now_ns() + int(timeout * 1e9)
        while True:
            outcome = channel.native.wait(job, min(until, FOREVER))
            if outcome[0] == OK:
                return self._result
            if outcome[0] != AGAIN:
                raise channel.error(job, outcome)
            if _native.now_ns() >= until:
                raise self._late(timeout)

    def cancel(self) -> bool:
        """Takes the collective back if it has not begun on this rank: it then ends as `Cancelled`
        on every rank. False, and no effect, if it has begun or is over."""
        return self.channel.native.withdraw(self._job)

    def _late(self, timeout: float) -> Error:
        rank, name = self.channel.rank, self._name
        said = f"rank {rank} waited {timeout:g} s for its {name}"
        if self.cancel():
            return Timeout(f"{said}, which had not begun and is cancelled on every rank")
        late = self.channel.native.late(self._job)
        who = ", ".join(map(str, late))
        missing = (
            f" ({'rank' if len(late) == 1 else 'ranks'} {who} did not make it)" if late else ""
        )
        error = Timeout(f"{said}{missing}; it had begun, so the group is over: form a new one")
        self.channel.fabric.give_up(error)
        return error
