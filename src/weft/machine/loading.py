"""Reads machine descriptions from TOML. Errors say in one sentence what is wrong with a file."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from weft.dtype import DTYPES
from weft.errors import Unsupported, nearest
from weft.machine import calibrated
from weft.machine.description import Bounds, Machine
from weft.machine.server import Server, merged, with_server
from weft.machine.toml_file import read_toml

_FOLDER = Path(__file__).parent
_SERVERS = _FOLDER / "servers"
_MOST = 1e30
"""More than any number of a machine or a model."""
_MOST_BASES = 16

Kind = TypeVar("Kind")


def names() -> list[str]:
    """The names of the nodes of devices that come with weft."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def server_names() -> list[str]:
    """The names of the CPU servers that come with weft."""
    return sorted(path.stem for path in _SERVERS.glob("*.toml"))


def all_names() -> list[str]:
    """The names of all machines that come with weft."""
    return [*names(), *server_names()]


def _shipped_file(name: str) -> Path:
    return (_FOLDER if name in names() else _SERVERS) / f"{name}.toml"


def file_of(name_or_path: str) -> Path:
    """The file that describes a machine, by its name or path."""
    if name_or_path in all_names():
        return _shipped_file(name_or_path)
    load(name_or_path)  # says what is wrong with it
    return calibrated.path(name_or_path) if calibrated.named(name_or_path) else Path(name_or_path)


def load(name_or_path: str | Path) -> Machine:
    """The machine with that name, or the one that the TOML file at that path describes. `cpu` is
    this host, as `weft calibrate` measured it, and `cpu-8-threads` the same with ranks of eight
    threads."""
    text = str(name_or_path)
    if calibrated.named(text):
        return _calibrated(text)
    if isinstance(name_or_path, str) and text in all_names():
        return _shipped(text)
    path = Path(name_or_path)
    if os.path.isfile(path):
        return _read(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise Unsupported(f"There is no machine file {text}.")
    raise Unsupported(
        f"There is no machine named {text!r}{nearest(text, [*all_names(), calibrated.NAME])};"
        f" known are {', '.join(all_names())}, {calibrated.NAME} (this host, once calibrated),"
        " and any TOML file by its path."
    )


def _calibrated(name: str) -> Machine:
    path = calibrated.path(name)
    if not os.path.isfile(path):
        found = calibrated.kept()
        others = f" It is described as {', '.join(found)}." if found else ""
        raise Unsupported(
            f"This host is not described as {name} yet; run `{_command(name)}` first.{others}"
        )
    try:
        return _read(path)
    except Unsupported as error:
        raise Unsupported(
            f"The description of this host does not hold ({str(error).rstrip('.')});"
            f" run `{_command(name)}` to write it anew."
        ) from error


def _command(name: str) -> str:
    """The command that writes the description of this host with that name."""
    threads = name.removeprefix(calibrated.NAME).strip("-").removesuffix("-threads")
    return f"weft calibrate --threads {threads}" if threads else "weft calibrate"


@lru_cache
def _shipped(name: str) -> Machine:
    return _read(_shipped_file(name))


def _read(path: Path) -> Machine:
    return from_table({"name": path.stem, **read_table(path)}, path.name)


def spelt_out(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The tables of a machine: where there is a `[server]`, what follows from it."""
    if "server" not in table:
        return dict(table)
    return with_server(table, _build(Server, table["server"], where, "server."))


def read_table(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a machine file. Where it names a `base`, a machine by its name or a file as
    seen from this one, it only says what differs; lists are replaced as a whole."""
    table = read_toml(path)
    base = table.pop("base", None)
    if base is None:
        return table
    found = _shipped_file(base) if base in all_names() else path.parent / str(base)
    if not os.path.isfile(found):
        raise Unsupported(
            f"{path.name}: there is no base {base!r}{nearest(str(base), all_names())}; it is one of"
            f" {', '.join(all_names())}, or a TOML file."
        )
    if found in above or found == path:
        raise Unsupported(f"{path.name}: base {base!r} leads back to itself.")
    if len(above) >= _MOST_BASES:
        raise Unsupported(f"{path.name}: a machine has at most {_MOST_BASES} files below it.")
    return merged(read_table(found, (*above, path)), table)


def build(kind: type[Kind], table: Mapping[str, Any], where: str) -> Kind:
    """A frozen dataclass from nested dictionaries. Raises unless every key is known and every
    number is within its bounds."""
    return cast(Kind, _build(kind, table, where, ""))


def from_table(table: Mapping[str, Any], where: str = "machine") -> Machine:
    """A machine from nested dictionaries, e.g. measured ones, with the checks of a file."""
    machine = _build(Machine, spelt_out(table, where), where, "")
    assert isinstance(machine, Machine)
    _check_whole(machine, where)
    return machine


def _build(kind: Any, table: Any, where: str, prefix: str) -> Any:
    if not isinstance(table, Mapping):
        raise Unsupported(f"{where}: {prefix.rstrip('.')} must be a table.")
    hints = get_type_hints(kind, include_extras=True)
    for key in table:
        if key not in hints:
            known = nearest(key, hints) or f" (known here: {', '.join(hints)})"
            raise Unsupported(f"{where}: unknown key {prefix}{key}{known}.")
    values = {}
    for item in fields(kind):
        if item.name in table:
            key = prefix + item.name
            values[item.name] = _value(hints[item.name], table[item.name], where, key)
        elif item.default is MISSING:
            raise Unsupported(f"{where}: {prefix}{item.name} is missing.")
    if "dtype" in values:
        _known_dtype(values["dtype"], where, prefix + "dtype")
    return kind(**values)


def _value(hint: Any, value: Any, where: str, key: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):  # an optional value that is given
        return _value(inner[0], value, where, key)
    if is_dataclass(hint):
        return _build(hint, value, where, key + ".")
    if origin is tuple:
        if not is_dataclass(inner[0]):
            if not isinstance(value, list):
                kind = "names" if get_origin(inner[0]) is Literal else "numbers"
                raise Unsupported(f"{where}: {key} must be a list of {kind}.")
            return tuple(_value(inner[0], one, where, f"{key}[{i}]") for i, one in enumerate(value))
        if not isinstance(value, list):
            raise Unsupported(f"{where}: {key} must be a list of tables.")
        return tuple(_build(inner[0], one, where, f"{key}[{i}].") for i, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise Unsupported(f"{where}: {key} must be a table by dtype.")
        for dtype in value:
            _known_dtype(dtype, where, key)
        return {
            dtype: _value(inner[1], one, where, f"{key}.{dtype}") for dtype, one in value.items()
        }
    if origin is Literal or hint is str:
        if not isinstance(value, str):
            raise Unsupported(f"{where}: {key} must be text, not {value!r}.")
        if inner and value not in inner:
            raise Unsupported(f"{where}: {key} must be {' or '.join(inner)}, not {value!r}.")
        return value
    return _number(inner[0] if inner else hint, inner[1] if inner else None, value, where, key)


def check_value(hint: Any, value: Any, key: str) -> None:
    """Raises unless a key may have that value."""
    try:
        _value(hint, value, "", key)
    except Unsupported as error:
        raise Unsupported(str(error).removeprefix(": ")) from error


def _known_dtype(dtype: str, where: str, key: str) -> None:
    known = [one.name for one in DTYPES.values() if one.rated == one.name]
    if dtype not in known:
        raise Unsupported(f"{where}: unknown dtype {dtype} in {key}{nearest(dtype, known)}.")


def _number(kind: Any, bounds: Bounds | None, value: Any, where: str, key: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported(f"{where}: {key} must be a number, not {value!r}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise Unsupported(f"{where}: {key} must be a finite number, not {value}.")
    if kind is int and value != int(value):
        raise Unsupported(f"{where}: {key} must be a whole number, not {value}.")
    if value < 0:
        raise Unsupported(f"{where}: {key} must not be negative, but is {value}.")
    if bounds is not None and value <= bounds.above:
        raise Unsupported(f"{where}: {key} must be more than {bounds.above:g}, not {value}.")
    if bounds is not None and value > bounds.most:
        raise Unsupported(f"{where}: {key} must be at most {bounds.most:g}, not {value}.")
    if value > _MOST:
        raise Unsupported(f"{where}: {key} must be at most {_MOST:g}.")
    return kind(value)


def _check_whole(machine: Machine, where: str) -> None:
    """Raises unless the sections fit each other, and rates are not above their peaks."""
    compute, memory, links = machine.compute, machine.memory, machine.links
    if (compute.tiling is None) == (compute.saturation is None):
        raise Unsupported(f"{where}: give either compute.tiling or compute.saturation.")
    if compute.tiling is not None and not compute.tiling.tiles:
        raise Unsupported(f"{where}: compute.tiling.tiles must hold at least one tile.")
    if not machine.cores.protocols:
        raise Unsupported(f"{where}: cores.protocols must hold at least one protocol.")
    for dtype, rate in compute.rate.items():
        if dtype in compute.peak and rate > compute.peak[dtype]:
            raise Unsupported(f"{where}: compute.rate.{dtype} is above compute.peak.{dtype}.")
    if memory.bandwidth > memory.peak_bandwidth:
        raise Unsupported(f"{where}: memory.bandwidth is above memory.peak_bandwidth.")
    if links.bandwidth > links.peak_bandwidth:
        raise Unsupported(f"{where}: links.bandwidth is above links.peak_bandwidth.")
