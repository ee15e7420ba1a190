"""Benchmarks of what weft promises. A benchmark is one file in this folder with a function
`run(report)` and its axes at the top. `weft bench NAME` runs it. A file may also have a function
`quick(report)`: a few small cases in some seconds, which show that it works and judge nothing."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from weft.errors import Unsupported, nearest
from weft.measure.launch import Report


@dataclass(frozen=True)
class Check:
    """One promise: a measured value, and the bound that it must keep, e.g. `<= 1.05`."""

    name: str
    value: float
    bar: str

    @property
    def ok(self) -> bool:
        comparison, limit = self.bar.split()
        value, bound = self.value, float(limit)
        return value <= bound if comparison == "<=" else value >= bound


@dataclass(frozen=True)
class Result:
    """A table of measurements, and the checks on them.

    found: the data for the generator of the benchmark's documents (docs/generate/NAME.py).
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str | float | int | None]]
    checks: Sequence[Check]
    found: object = None

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [dict(zip(self.headers, row, strict=True)) for row in self.rows],
            "checks": [
                {"name": c.name, "value": c.value, "bar": c.bar, "ok": c.ok} for c in self.checks
            ],
        }


def names() -> list[str]:
    """The names of all benchmarks."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Callable[[Report], Result]:
    """The benchmark with that name."""
    if name not in names():
        raise Unsupported(
            f"there is no benchmark {name!r}{nearest(name, names())}; known: {', '.join(names())}"
        )
    function: Callable[[Report], Result] = _module(name).run
    return function


def quick_names() -> list[str]:
    """The names of the benchmarks that have a quick form."""
    return [name for name in names() if hasattr(_module(name), "quick")]


def find_quick(name: str) -> Callable[[Report], Result]:
    """The quick form of the benchmark with that name."""
    find(name)
    function: Callable[[Report], Result] | None = getattr(_module(name), "quick", None)
    if function is None:
        raise Unsupported(
            f"the benchmark {name} has no quick form; these have one: {', '.join(quick_names())}"
        )
    return function


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def part(report: Report, number: int, of: int) -> Report:
    """A progress callback for part `number` of `of` parts."""
    return lambda share, text: report((number + share) / of, text)
