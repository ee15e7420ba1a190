"""All that is wrong with a machine file, and what in it is hard to believe.

Loading stops at the first mistake; here all of them are found. What is possible but implausible is
compared with the machines that come with weft, which mostly finds numbers in the wrong unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from weft.errors import Unsupported, nearest
from weft.machine.description import Machine
from weft.machine.loading import check_value, from_table, load, names, server_names, spelt_out
from weft.machine.server import Server

FAR = 30.0
"""A number is doubted if it is this many times above or below those of all known machines."""

_UNITS = {
    "bandwidth": ("bytes per second", 1e9, "GB/s"),
    "capacity": ("bytes", 1e9, "GB"),
    "cache_bytes": ("bytes", 1e6, "MB"),
    "peak": ("flops per second", 1e12, "TFLOP/s"),
    "rate": ("flops per second", 1e12, "TFLOP/s"),
    "clock": ("Hz", 1e9, "GHz"),
    "store_rate": ("elements per second", 1e9, "billions of them"),
}
_SECONDS = ("seconds", 1e-6, "microseconds")
_TIMES = ("launch", "engines")
"""Sections whose remaining numbers are seconds."""


@dataclass(frozen=True)
class Remark:
    """Something about a key. Errors keep a file from being used; others are doubts."""

    key: str
    text: str
    error: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "text": self.text}


def check(table: Mapping[str, Any], name: str) -> tuple[Machine | None, list[Remark]]:
    """The machine, if the table makes one, and all that was found."""
    whole = {"name": name, **table}
    server = whole.get("server")
    found = [] if server is None else list(_mistakes(Server, server, "server."))
    if not found:
        whole = spelt_out(whole, name)
        found = list(_mistakes(Machine, whole, ""))
    if found:
        return None, found
    try:
        machine = from_table(whole, name)
    except Unsupported as error:
        text = str(error).removeprefix(f"{name}: ")
        return None, [Remark(text.split(" ", 1)[0], text, error=True)]
    return machine, list(_doubts(machine))


def _mistakes(kind: Any, table: Any, prefix: str) -> Iterator[Remark]:
    """Unknown and missing keys, and values that cannot be, of a table and the tables in it."""
    if not isinstance(table, Mapping):
        yield Remark(prefix.rstrip("."), f"{prefix.rstrip('.')} must be a table.", error=True)
        return
    hints = get_type_hints(kind, include_extras=True)
    for key in table:
        if key not in hints:
            known = ", ".join(hints) if prefix else ", ".join(h for h in hints if h != "name")
            where = f"[{prefix.rstrip('.')}]" if prefix else "the file"
            close = nearest(key, hints) or f" ({where} may have: {known})"
            yield Remark(prefix + key, f"{prefix}{key} is no key that weft knows{close}.", True)
    for item in fields(kind):
        key = prefix + item.name
        if item.name not in table:
            if item.default is MISSING:
                yield Remark(key, f"{key} is missing.", error=True)
            continue
        yield from _in_value(hints[item.name], table[item.name], key)


def _in_value(hint: Any, value: Any, key: str) -> Iterator[Remark]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        yield from _in_value(inner[0], value, key)
    elif is_dataclass(hint):
        yield from _mistakes(hint, value, key + ".")
    elif origin is tuple and is_dataclass(inner[0]) and isinstance(value, list):
        for place, one in enumerate(value):
            yield from _mistakes(inner[0], one, f"{key}[{place}].")
    else:
        try:
            check_value(hint, value, key)
        except Unsupported as error:
            yield Remark(key, str(error), error=True)


def _doubts(machine: Machine) -> Iterator[Remark]:
    """What can be, but is hard to believe."""
    yield from _far_off(machine)
    compute, memory, links = machine.compute, machine.memory, machine.links
    for dtype, rate in compute.rate.items():
        share = rate / compute.peak.get(dtype, rate)
        if share < 0.3:
            yield Remark(
                f"compute.rate.{dtype}",
                f"GEMMs reach only {100 * share:.0f} % of the peak; known machines reach 50-85 %.",
            )
    if compute.loaded_clock > compute.clock:
        yield Remark("compute.loaded_clock", "The clock under load is above the boost clock.")
    wide, narrow = compute.rate.get("bfloat16"), compute.rate.get("float8")
    if wide and narrow and narrow < wide:
        yield Remark("compute.rate.float8", "float8 GEMMs are slower than bfloat16 ones.")
    if compute.units * memory.unit_bandwidth < memory.bandwidth:
        yield Remark(
            "memory.unit_bandwidth",
            "All compute units together cannot ask for memory.bandwidth, so it is never reached.",
        )
    if memory.cache_bandwidth < memory.bandwidth:
        yield Remark("memory.cache_bandwidth", "The cache is slower than the memory behind it.")
    if memory.cache_bytes > memory.capacity:
        yield Remark("memory.cache_bytes", "The cache is larger than the memory behind it.")
    if memory.crowding_units > compute.units:
        yield Remark("memory.crowding_units", "More units would have to go than there are.")
    out = links.out_of_device(links.world)
    if links.topology != "switch" and links.total_bandwidth > 1.01 * out:
        yield Remark(
            "links.total_bandwidth",
            f"It is more than all links of the {links.topology} give, {out:.3g}.",
        )
    if out > memory.bandwidth:
        yield Remark("links.total_bandwidth", "Links are faster than the memory they read from.")
    if machine.engines.bandwidth > links.peak_bandwidth and links.topology != "switch":
        yield Remark("engines.bandwidth", "A copy engine is faster than the link it writes to.")
    for key in ("all_gather_units", "all_to_all_units", "copy_units"):
        if getattr(machine.cores, key) > compute.units:
            yield Remark(f"cores.{key}", "More compute units are wanted than there are.")
    for place, protocol in enumerate(machine.cores.protocols):
        if protocol.bandwidth > 1.05 * max(out, links.peak_bandwidth):
            yield Remark(
                f"cores.protocols[{place}].bandwidth",
                f"A library moves {protocol.bandwidth:.3g} bytes per second out of a device whose "
                f"links give {out:.3g}.",
            )
    if links.interference > 1.0:
        yield Remark(
            "links.interference",
            "Kernels and bytes would more than double each other's time; 0 to 0.4 was measured.",
        )


def _far_off(machine: Machine) -> Iterator[Remark]:
    ranges = _ranges(machine.host is not None)
    for key, value in _numbers(machine):
        low, high = ranges.get(key, (0.0, 0.0))
        if high == 0.0 or value == 0.0 or key.startswith("host."):
            continue
        if not low / FAR <= value <= high * FAR:
            known = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
            text = f"{key} is {value:.3g}; machines that come with weft have {known}"
            yield Remark(key, text + _unit_hint(key, value, low, high) + ".")


def _unit_hint(key: str, value: float, low: float, high: float) -> str:
    """What unit is expected, and which one the number may be in."""
    section, *middle = key.split(".")
    name = next(
        (unit for unit in _UNITS if any(part.endswith(unit) for part in middle)),
        None,
    )
    if name is not None:
        unit, scale, other = _UNITS[name]
    elif section in _TIMES or "latency" in key or "seconds" in key:
        unit, scale, other = _SECONDS
    else:
        return ""
    said = f". It is in {unit}"
    if low / FAR <= value * scale <= high * FAR:
        said += f"; {value:.4g} looks like {other}: write {value * scale:.4g}"
    return said


@lru_cache
def _ranges(servers: bool) -> dict[str, tuple[float, float]]:
    """The least and the most that the machines of weft of the same kind have, by key; zeros do not
    count."""
    found: dict[str, tuple[float, float]] = {}
    for name in server_names() if servers else names():
        for key, value in _numbers(load(name)):
            if value == 0.0:
                continue
            low, high = found.get(key, (value, value))
            found[key] = (min(low, value), max(high, value))
    return found


def _numbers(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers by key; those of lists share one, without their place."""
    if is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            key = f"{prefix}.{item.name}" if prefix else item.name
            yield from _numbers(getattr(value, item.name), key)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _numbers(one, f"{prefix}.{name}")
    elif isinstance(value, tuple):
        for one in value:
            yield from _numbers(one, prefix)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, float(value)
