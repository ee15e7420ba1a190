"""What is computed: an Operation knows its sizes, its flops and its bytes, and nothing of time.

A new operation is one new file in `weft/plan/`: its dataclass, its lowering, and one `register`
call. `find` discovers those files; no list of them is kept anywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from weft.dtype import ITEM_BYTES as ITEM_BYTES
from weft.dtype import find as find_dtype
from weft.errors import Unsupported, nearest


class Operation(Protocol):
    """What every operation tells: a frozen, hashable value."""

    name: ClassVar[str]

    @property
    def dtype(self) -> str:
        """The dtype of its inputs, by name. `result_dtype` is that of its outputs."""
        ...

    @property
    def world(self) -> int:
        """How many ranks take part."""
        ...

    @property
    def label(self) -> str:
        """The operation with its sizes, in a few words, for tables and errors."""
        ...

    def num_flops(self, rank: int) -> int:
        """Floating point operations that the rank carries out."""
        ...

    def num_bytes(self, source: int, target: int) -> int:
        """Bytes that must travel from one rank to another."""
        ...

    def compute_only(self) -> Operation:
        """The same arithmetic of one rank with nothing to communicate: a world of one."""
        ...


def result_dtype(operation: Operation) -> str:
    """The dtype of what an operation gives: `result` where it has one, else that of its inputs."""
    return find_dtype(getattr(operation, "result", None) or operation.dtype).name


def dtypes_label(operation: Operation) -> str:
    """The dtypes of an operation in a few words: `bfloat16`, or `float8 to bfloat16`."""
    result = result_dtype(operation)
    return result if result == operation.dtype else f"{operation.dtype} to {result}"


_known: dict[str, type[Any]] = {}


def register(operation: type[Any]) -> type[Any]:
    """Class decorator: makes an operation known by its name."""
    _known[operation.name] = operation
    return operation


def names() -> list[str]:
    """The names of all operations, in alphabetical order."""
    _discover()
    return sorted(_known)


def find(name: str) -> type[Any]:
    """The operation class of that name."""
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
    """The sizes of `torch.tensor_split`: as even as can be, the larger ones first."""
    base, rest = total // parts, total % parts  # no divmod: sizes in graphs are symbols
    return tuple(base + (part < rest) for part in range(parts))


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, if parts of these sizes follow each other."""
    return [0, *accumulate(sizes)][:-1]


def is_split(sizes: Sequence[int]) -> bool:
    """Whether sizes are an even split of their sum, as `tensor_split` or `chunk` would cut it."""
    total, parts = sum(sizes), len(sizes)
    if tuple(sizes) == split(total, parts):
        return True
    step = -(-total // parts)
    return list(sizes) == [max(0, min(step, total - part * step)) for part in range(parts)]
