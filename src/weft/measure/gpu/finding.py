"""One result of an examination, and a whole report without names or paths."""

from __future__ import annotations

import getpass
import platform
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "not", "unknown"]

POINTS = {
    1: "versions",
    2: "topology",
    3: "environment",
    4: "symmetric memory",
    5: "who copies",
    6: "order",
    7: "results",
    8: "speed",
    9: "not checked",
}
FORMAT = 1
"""The version of the report's JSON."""


@dataclass(frozen=True)
class Finding:
    """point: a key of POINTS. state: ok, not, or unknown if it could not be found out. remedy: what
    to do about it."""

    point: int
    what: str
    state: State
    found: str
    remedy: str = ""


@dataclass
class Examination:
    """A device's checks, and the figures that go with them."""

    device: str
    title: str
    world: int
    checks: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    machine: str = ""
    """A machine file for `weft explore`."""

    @property
    def verdict(self) -> str:
        wrong = [check for check in self.checks if check.state == "not"]
        unknown = [check for check in self.checks if check.state == "unknown" and check.point < 9]
        if wrong:
            things = "check fails" if len(wrong) == 1 else "checks fail"
            return f"{len(wrong)} {things} on {self.title}; the lines above say what to do."
        if unknown:
            return f"Nothing fails on {self.title}; {len(unknown)} could not be found out."
        return f"All checks pass on {self.title}."

    def as_dict(self) -> dict[str, Any]:
        """The report as it is sent: without the names of hosts and users, and without paths."""
        from weft.fabric import VERSION

        report = {
            "format": FORMAT,
            "weft": VERSION,
            "device": self.device,
            "title": self.title,
            "world": self.world,
            "verdict": self.verdict,
            "checks": [{**asdict(c), "point": POINTS[c.point]} for c in self.checks],
            "figures": self.figures,
            "machine": self.machine,
        }
        cleaned: dict[str, Any] = anonymous(report)
        return cleaned


_PATH = re.compile(r"(?<![\w/])(?:/[\w.+@-]+){2,}/?")


def anonymous(value: Any) -> Any:
    """A value with every path, host name and user name replaced in its texts."""
    if isinstance(value, dict):
        return {key: anonymous(one) for key, one in value.items()}
    if isinstance(value, list):
        return [anonymous(one) for one in value]
    if not isinstance(value, str):
        return value
    text = _PATH.sub("PATH", value)
    for name, stands in ((platform.node(), "HOST"), (_user(), "USER")):
        if len(name) > 1:
            text = re.sub(rf"\b{re.escape(name)}\b", stands, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
