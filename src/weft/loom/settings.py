"""The settings of a loom device: arguments of `load`, or environment variables."""

from __future__ import annotations

import math
import os
import re
from dataclasses import asdict, dataclass, fields

from weft.errors import Unsupported, nearest

MODES = ("eager", "late", "random")

_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Settings:
    """mode: when operations run: at once, as late as the program allows, or after seeded delays.
    queues: hardware queues that all streams share, 0 for one each. units: kernels at once. pace:
    bytes a second of a link, 0 for memory's. deadline: seconds of a wait. check: keep what the
    detector needs. heap: MiB of device memory."""

    check: bool = False
    mode: str = "eager"
    seed: int = 0
    queues: int = 0
    units: int = 2
    pace: float = 0.0
    deadline: float = 60.0
    heap: int = 8192
    session: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise Unsupported(
                f"loom has no mode {self.mode!r}{nearest(self.mode, MODES)}; "
                f"the modes are {', '.join(MODES)}"
            )
        for name, least in (("queues", 0), ("units", 1), ("pace", 0), ("heap", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise Unsupported(f"{name} must be at least {least}, not {getattr(self, name)}")

    @classmethod
    def of(cls, **given: object) -> Settings:
        """What is given, else what `WEFT_LOOM_*` say, else the defaults."""
        values: dict[str, object] = {}
        for field in fields(cls):
            text = os.environ.get(f"WEFT_LOOM_{field.name.upper()}")
            value = given.get(field.name)
            if value is None and text is not None:
                value = text
            if value is not None:
                values[field.name] = _parse(field.name, value)
        unknown = set(given) - {f.name for f in fields(cls)}
        if unknown:
            raise Unsupported(f"loom has no setting {sorted(unknown)[0]!r}")
        return cls(**values)  # type: ignore[arg-type]

    def environment(self) -> dict[str, str]:
        """The variables that say the same to another process."""
        found = {}
        for name, value in asdict(self).items():
            text = str(int(value)) if isinstance(value, bool) else str(value)
            if text:
                found[f"WEFT_LOOM_{name.upper()}"] = text
        return found


def parse_pace(text: str) -> float:
    """Bytes a second of `2GB/s`, `500MB/s` or a number."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?B)?(?:/s)?", text.strip())
    try:
        assert match is not None
        pace = float(match[1]) * _UNITS[match[2] or ""]
        assert math.isfinite(pace)
        return pace
    except (AssertionError, ValueError):
        raise Unsupported(f"a link's speed is said as 2GB/s or 500MB/s, not {text!r}") from None


def _parse(name: str, value: object) -> object:
    kind = {f.name: f.type for f in fields(Settings)}[name]
    if name == "pace" and isinstance(value, str):
        return parse_pace(value)
    try:
        if kind == "bool":
            return value if isinstance(value, bool) else value not in ("", "0", "no", "off")
        return {"int": int, "float": float, "str": str}[str(kind)](value)
    except ValueError:
        raise Unsupported(f"WEFT_LOOM_{name.upper()} must be a number, not {value!r}") from None
