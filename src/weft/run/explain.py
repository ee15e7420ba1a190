"""What happened in the last call, in words: which schedule ran, why, and what moved the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.run.session import Finished, last_finished


@dataclass(frozen=True)
class Explanation:
    """The last call of this process. `percent_of_ideal` needs recording: the ideal is the longer
    of the rank's compute and communication, as they were busy in this very call; 100 is reached
    when the call took no longer than that."""

    operation: str
    schedule: str
    """The schedule that ran."""
    why: str
    seconds: float
    bytes_by_engine: dict[str, int]
    num_tasks: int
    workspace_bytes: int
    percent_of_ideal: float | None
    asked: str = ""
    """The schedule as the caller gave it; "auto" if it was chosen."""
    fabric: str = ""

    def __str__(self) -> str:
        moved = ", ".join(f"{n / 1e6:.2f} MB by {e}" for e, n in self.bytes_by_engine.items())
        lines = [
            f"{self.operation}",
            f"  schedule   {self.schedule} ({self._reason()})",
            *([f"  fabric     {self.fabric}"] if self.fabric not in ("", "host") else []),
            f"  took       {self.seconds * 1e3:.3f} ms in {self.num_tasks} tasks of this rank",
            f"  moved      {moved or 'nothing'}",
            f"  workspace  {self.workspace_bytes / 1e6:.2f} MB",
        ]
        if self.percent_of_ideal is None:
            lines.append("  of ideal   unknown: call inside `with weft.record():` to find out")
        else:
            lines.append(f"  of ideal   {self.percent_of_ideal:.0f} %")
        return "\n".join(lines)

    def _reason(self) -> str:
        """Why this schedule ran, and what was asked for if that is another one."""
        if self.asked in ("", self.schedule) or self.asked in self.why:
            return self.why
        return f"asked for {self.asked}; {self.why}"


others: list[Callable[[], tuple[float, Explanation] | None]] = []
"""Calls that are no plans: each source gives the moment at which its last one ended, by
`time.perf_counter`, and what is to be said of it."""


def explain() -> Explanation | None:
    """Explains the last weft call of this process, an operator's or a collective's; None if there
    was none."""
    found = [given for other in others if (given := other()) is not None]
    last = last_finished()
    if last is not None:
        found.append((last.ended, _of_plan(last)))
    return max(found, key=lambda given: given[0])[1] if found else None


def _of_plan(done: Finished) -> Explanation:
    percent = None
    if done.timeline.spans:
        compute = done.timeline.compute_seconds(done.rank)
        communication = done.timeline.communication_seconds(done.rank)
        percent = 100.0 * min(1.0, max(compute, communication) / done.seconds)
    return Explanation(
        operation=done.plan.operation.label,
        schedule=str(done.plan.schedule),
        why=done.why,
        seconds=done.seconds,
        bytes_by_engine=done.plan.bytes_by_engine(done.rank),
        num_tasks=sum(task.rank == done.rank for task in done.plan.tasks),
        workspace_bytes=done.plan.workspace[done.rank],
        percent_of_ideal=percent,
        asked=done.asked,
        fabric=done.fabric,
    )
