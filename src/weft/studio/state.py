"""What a reader of the studio asks: one frozen, checked value, written to and read from the query
of a link. Every number has a limit, because a link can come from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any
from urllib.parse import urlencode

from weft.dtype import MULTIPLIED
from weft.errors import Unsupported, nearest
from weft.machine import Machine, all_names, calibrated, load
from weft.operation import find
from weft.plan.tasks import Plannable
from weft.schedule import Schedule
from weft.studio.changes import Changes
from weft.study.layers.listing import SHARED

EMBEDDING = "embedding_all_to_all"
TABLE_DTYPES = ("float32", "float16", "bfloat16")
SHARED_SIZE = {**SHARED, EMBEDDING: "n"}
"""The operations that can be asked about, and which of their sizes the ranks share."""
MOST_SIZE = 1 << 20
MOST_ROWS = 1 << 24
MOST_WORLD = 16
"""A plan has tasks for every pair of ranks; with more, an answer would take seconds."""
SLOWEST_LINK = 0.001
"""GB/s. With much less, times would not be numbers that a page can read."""
_LIMITS: dict[str, tuple[float, float]] = {
    "m": (1, MOST_ROWS),
    "n": (1, MOST_SIZE),
    "k": (1, MOST_SIZE),
    "world": (2, MOST_WORLD),
    "link": (0, 100_000),
    "latency": (-1, 10_000),
    "engines": (0, 64),
    "launch": (0, 100),
    "contention": (0, 10),
}


@dataclass(frozen=True)
class State:
    """One question. Sizes are those of the whole product over all ranks.

    beside: a second machine, or "". link: GB/s out of a device (0: the machine's). latency: of a
    link in microseconds (-1: the machine's). engines: copy engines (0: the machine's). launch and
    contention: multiples of the machine's. pinned: a schedule whose timeline is always drawn.
    """

    machine: str = "mi300x"
    beside: str = ""
    op: str = "all_gather_matmul"
    m: int = 16384
    n: int = 28672
    k: int = 8192
    world: int = 8
    dtype: str = "bfloat16"
    link: float = 0.0
    latency: float = -1.0
    engines: int = 0
    launch: float = 1.0
    contention: float = 1.0
    captured: bool = False
    pinned: str = ""

    def __post_init__(self) -> None:
        known = machine_names()
        for machine in self.machine_names:
            if machine not in known:
                raise Unsupported(
                    f"there is no machine {machine!r}{nearest(machine, known)}; "
                    f"known: {', '.join(known)}"
                )
        if self.beside == self.machine:
            raise Unsupported(f"{self.machine} is chosen twice; choose another to compare with")
        if self.op not in SHARED_SIZE:
            raise Unsupported(
                f"there is no operation {self.op!r}{nearest(self.op, SHARED_SIZE)}; "
                f"known: {', '.join(SHARED_SIZE)}"
            )
        if self.dtype not in MULTIPLIED:
            raise Unsupported(f"there is no dtype {self.dtype!r}{nearest(self.dtype, MULTIPLIED)}")
        if self.op == EMBEDDING and self.dtype not in TABLE_DTYPES:
            raise Unsupported(f"tables hold {', '.join(TABLE_DTYPES)}, not {self.dtype}")
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if not isfinite(value) or not least <= value <= most:
                raise Unsupported(f"{name} must be from {least} to {most:g}, not {value:g}")
        if 0 < self.link < SLOWEST_LINK:
            raise Unsupported(f"link must be 0 or at least {SLOWEST_LINK:g}, not {self.link:g}")
        if self.pinned:
            Schedule.parse(self.pinned)

    @property
    def machine_names(self) -> tuple[str, ...]:
        return (self.machine, self.beside) if self.beside else (self.machine,)

    @property
    def changes(self) -> Changes:
        return Changes(
            link=self.link * 1e9 if self.link else None,
            latency=self.latency * 1e-6 if self.latency >= 0 else None,
            engines=self.engines or None,
            launch=self.launch,
            contention=self.contention,
            captured=self.captured,
        )

    def machines(self) -> list[Machine]:
        """The machines that are asked about, as changed."""
        found = [self.changes.apply(load(name)) for name in self.machine_names]
        for machine in found:
            if self.world > machine.links.world:
                raise Unsupported(
                    f"{machine.name} has {machine.links.world} devices, not {self.world}"
                )
        return found

    def operation(self) -> Plannable:
        """The operation: the ranks share the size that this kind of layer shares."""
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        axis = SHARED_SIZE[self.op]
        sizes[axis] = -(-sizes[axis] // self.world)
        made: Plannable = find(self.op).of(**sizes, world=self.world, dtype=self.dtype)
        return made

    def to_query(self) -> str:
        """The query of a link: what differs from the defaults."""
        default, own = asdict(State()), asdict(self)
        return urlencode({k: _text(v) for k, v in own.items() if v != default[k]})

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> State:
        """The state of a query. Keys that are not fields are an error that names the nearest."""
        kinds = {field.name: field.type for field in fields(cls)}
        found: dict[str, Any] = {}
        for key, text in query.items():
            if key not in kinds:
                raise Unsupported(f"there is no {key!r}{nearest(key, kinds)} in a link")
            found[key] = _value(key, str(kinds[key]), text)
        return cls(**found)


def machine_names() -> list[str]:
    """The machines that come with weft, and this host as it is calibrated."""
    return [*all_names(), *calibrated.kept()]


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else f"{value}"


def _value(key: str, kind: str, text: str) -> object:
    if len(text) > 64:
        raise Unsupported(f"{key} is too long")
    if kind == "str":
        return text
    if kind == "bool":
        if text not in ("0", "1"):
            raise Unsupported(f"{key} must be 0 or 1, not {text!r}")
        return text == "1"
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        what = "a whole number" if kind == "int" else "a number"
        raise Unsupported(f"{key} must be {what}, not {text!r}") from None
