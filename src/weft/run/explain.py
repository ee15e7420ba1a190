"""Explains the last call: which schedule ran, the reason, and what moved the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from weft import html
from weft.run.session import Finished, last_finished

ASKED = "asked for"
"""The reason of a schedule that the caller named."""


@dataclass(frozen=True)
class Explanation:
    """The last call of this process.

    `percent_of_ideal` needs recording. The ideal is the longer of the times in which this rank
    computed and communicated in this call; 100 means that the call took no longer than that.
    `percent_of_gain` is the share of the possible gain: 0 if the call took as long as both one
    after the other, 100 if it took no longer than the ideal; None if there was nothing to overlap.
    """

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
    percent_of_gain: float | None = None
    way: str = ""
    """How the plan was carried out, if not task by task."""

    def __str__(self) -> str:
        return "\n".join([self.operation, *(f"  {name:9}  {said}" for name, said in self._rows())])

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return html.table(self._rows(), title=self.operation)

    def _rows(self) -> list[tuple[str, str]]:
        moved = ", ".join(f"{n / 1e6:.2f} MB by {e}" for e, n in self.bytes_by_engine.items())
        gain = "unknown: call inside `with weft.record():` to find out"
        if self.percent_of_gain is not None:
            gain = f"{self.percent_of_gain:.0f} % of the possible gain"
        elif self.percent_of_ideal is not None:
            gain = "nothing to overlap"
        return [
            ("schedule", f"{self.schedule} ({self._reason()})"),
            *([("fabric", self.fabric)] if self.fabric not in ("", "host") else []),
            ("took", f"{self.seconds * 1e3:.3f} ms in {self.num_tasks} tasks of this rank"),
            *([("way", self.way)] if self.way else []),
            ("moved", moved or "nothing"),
            ("workspace", f"{self.workspace_bytes / 1e6:.2f} MB"),
            ("gain", gain),
        ]

    def _reason(self) -> str:
        """The reason for the schedule that ran, and the schedule that was asked for if it
        differs."""
        if self.asked in ("", self.schedule) or self.asked in self.why:
            return self.why
        return f"{ASKED} {self.asked}" + ("" if self.why == ASKED else f"; {self.why}")


def explain_plan() -> tuple[float, Explanation] | None:
    """The last operator call of this process, with the moment at which it ended (by
    `time.perf_counter`); None if there was none."""
    last = last_finished()
    return None if last is None else (last.ended, _of_plan(last))


def _of_plan(done: Finished) -> Explanation:
    percent = gain = None
    if done.timeline.spans:
        compute = done.timeline.compute_seconds(done.rank)
        communication = done.timeline.communication_seconds(done.rank)
        percent = 100.0 * min(1.0, max(compute, communication) / done.seconds)
        if possible := min(compute, communication):
            saved = compute + communication - done.seconds
            gain = 100.0 * min(1.0, max(0.0, saved / possible))
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
        percent_of_gain=gain,
        way=done.way,
    )
