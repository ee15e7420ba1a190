"""The report of the pass for one graph: the pairs that it replaced, and those that it could not."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Match:
    """A pair that was replaced by one operator. `nodes` names the collective and the products."""

    operator: str
    nodes: tuple[str, ...]
    detail: str = ""

    def __str__(self) -> str:
        return f"{' + '.join(self.nodes)} -> {self.operator}" + (
            f" ({self.detail})" if self.detail else ""
        )


@dataclass(frozen=True)
class NearMiss:
    """A collective, or a product next to one, that was not overlapped, and the reason.

    operator: the collective of weft that runs instead of torch's. kept: why torch's is kept, if it
    is.
    """

    node: str
    reason: str
    operator: str = ""
    kept: str = ""

    def __str__(self) -> str:
        kept = f"; torch's is kept: {self.kept}" if self.kept not in ("", self.reason) else ""
        instead = f" -> weft.{self.operator}" if self.operator else ""
        return f"{self.node}: {self.reason}{kept}{instead}"


@dataclass
class Report:
    """The outcome for one graph."""

    matches: list[Match] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"replaced {len(self.matches)} in {self.seconds * 1e3:.0f} ms"]
        lines += [f"  {match}" for match in self.matches]
        if self.near_misses:
            lines.append(f"not overlapped: {len(self.near_misses)}")
            lines += [f"  {miss}" for miss in self.near_misses]
        return "\n".join(lines)
