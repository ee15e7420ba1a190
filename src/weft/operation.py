"""Operations: what is computed. An operation knows its sizes, flops and bytes, but no times.

A new operation is one new file in `weft/plan/`: its dataclass, its lowering, and one `register`
call. `find` discovers these files; there is no list of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from weft.dtype import find as find_dtype
from weft.errors import Unsupported, nearest


class Operation(Protocol):
    """The properties of every operation, which is a frozen, hashable value."""

    name: ClassVar[str]

    @property
    def dtype(self) -> str:
        """The name of the dtype of its inputs. `result_dtype` is that of its outputs."""
        ...

    @property
    def world(self) -> int:
        """The number of ranks."""
        ...

    @property
    def label(self) -> str:
        """A short description with sizes, for tables and errors."""
        ...

    def num_flops(self, rank: int) -> int:
        """The number of floating point operations of a rank."""
        ...

    def num_bytes(self, source: int, target: int) -> int:
        """The bytes that must be sent from one rank to another."""
        ...

    def compute_only(self) -> Operation:
        """The computation of one rank without communication, as an operation with a world of 1."""
        ...


def result_dtype(operation: Operation) -> str:
    """The dtype of what an operation gives: `result` where it has one, else that of its inputs."""
    return find_dtype(getattr(operation, "result", None) or operation.dtype).name


def dtypes_label(operation: Operation) -> str:
    """The dtypes of an operation in a few words: `bfloat16`, or `float8 to bfloat16`."""
    result = result_dtype(operation)
    return result if result == operation.dtype else f"{operation.dtype} to {result}"


def ranks_label(world: int) -> str:
    """`1 rank`, `2 ranks`."""
    return "1 rank" if world == 1 else f"{world} ranks"


_known: dict[str, type[Any]] = {}


def register(operation: type[Any]) -> type[Any]:
    """Class decorator that registers an operation by its name."""
    _known[operation.name] = operation
    return operation


def names() -> list[str]:
    """The names of all operations, sorted."""
    _discover()
    return sorted(_known)


def find(name: str) -> type[Any]:
    """The operation class with that name."""
    _discover()
    if name not in _known:
        raise Unsupported(
            f"there is no operation {name!r}{nearest(name, _known)}; "
            f"known: {', '.join(sorted(_known))}"
        )
    return _known[name]


def _discover() -> None:
    package = importlib.import_module("weft.plan")
    for module in pkgutil.iter_modules(package.__path__, "weft.plan."):
        importlib.import_module(module.name)


def split(total: int, parts: int) -> tuple[int, ...]:
    """The sizes of `torch.tensor_split`: as even as possible, larger parts first."""
    base, rest = total // parts, total % parts  # no divmod: sizes may be symbols of a graph
    return tuple(base + (part < rest) for part in range(parts))


def starts(sizes: Sequence[int]) -> list[int]:
    """The start of each part, if parts of these sizes follow each other."""
    return [0, *accumulate(sizes)][:-1]


def is_split(sizes: Sequence[int]) -> bool:
    """Whether the sizes are an even split of their sum, as `tensor_split` or `chunk` makes it."""
    total, parts = sum(sizes), len(sizes)
    if tuple(sizes) == split(total, parts):
        return True
    step = -(-total // parts)
    return list(sizes) == [max(0, min(step, total - part * step)) for part in range(parts)]
