"""What differs from a machine as described: applied to it, or written as a machine file that names
the machine as its base."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from math import inf
from typing import Any

from weft.errors import Unsupported
from weft.machine import Machine


@dataclass(frozen=True)
class Changes:
    """Changes of a machine in SI units; None and 1 change nothing.

    link: bytes per second out of a device over all its links. Whatever moves bytes over them is
    changed by the same ratio. latency: seconds of a link. engines: copy engines. launch: multiple
    of what starting kernels costs. contention: multiple of what kernels and bytes slow each other.
    captured: as if plans were captured in a graph.
    """

    link: float | None = None
    latency: float | None = None
    engines: int | None = None
    launch: float = 1.0
    contention: float = 1.0
    captured: bool = False

    @property
    def nothing(self) -> bool:
        """Whether the machine stays as described, apart from `captured`."""
        return replace(self, captured=False) == Changes()

    def apply(self, machine: Machine) -> Machine:
        """The changed machine."""
        if machine.host is not None and (self.captured or self.contention != 1.0):
            raise Unsupported(
                f"{machine.name} is a host: it has no graphs to capture and no contention to "
                "change; reset both"
            )
        if self.nothing:
            return machine.captured() if self.captured else machine
        links, engines, launch, cores = (
            machine.links,
            machine.engines,
            machine.launch,
            machine.cores,
        )
        ratio = 1.0 if self.link is None else self.link / links.total_bandwidth
        links = replace(
            links,
            peak_bandwidth=links.peak_bandwidth * ratio,
            bandwidth=links.bandwidth * ratio,
            total_bandwidth=links.total_bandwidth * ratio,
            latency=links.latency if self.latency is None else self.latency,
            interference=links.interference * self.contention,
        )
        engines = replace(
            engines,
            bandwidth=engines.bandwidth * ratio,
            count=engines.count if self.engines is None else self.engines,
        )
        protocols = tuple(replace(p, bandwidth=p.bandwidth * ratio) for p in cores.protocols)
        in_switch = cores.in_switch
        if in_switch is not None:
            in_switch = replace(in_switch, bandwidth=in_switch.bandwidth * ratio)
        gap = launch.captured_gap
        launch = replace(
            launch,
            host=launch.host * self.launch,
            gap=launch.gap * self.launch,
            decision=launch.decision * self.launch,
            captured_gap=None if gap is None else gap * self.launch,
        )
        cores = replace(cores, protocols=protocols, in_switch=in_switch)
        changed = replace(machine, links=links, engines=engines, launch=launch, cores=cores)
        return changed.captured() if self.captured else changed

    def toml(self, machine: Machine) -> str:
        """A machine file with the changes. `captured` is not part of it: commands have an option
        of that name."""
        changed = replace(self, captured=False).apply(machine)
        lines = [f'base = "{machine.name}"', f'title = "{machine.title}, changed"']
        for section in ("links", "engines", "launch", "cores"):
            before, after = getattr(machine, section), getattr(changed, section)
            entries = [
                f"{field.name} = {_toml(getattr(after, field.name))}"
                for field in fields(after)
                if getattr(after, field.name) != getattr(before, field.name)
            ]
            if entries:
                lines += ["", f"[{section}]", *entries]
        return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if is_dataclass(value) and not isinstance(value, type):
        kept = {k: v for k, v in asdict(value).items() if v is not None and v not in (inf, ())}
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in kept.items()) + " }"
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.9g}" if isinstance(value, float) else str(value)
