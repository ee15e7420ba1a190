"""One table of element types: what an element takes, how it is summed, and its numbers elsewhere.

Every other room takes names, bytes and numbers from here. Plans and descriptions of machines name a
dtype by its string, so this file does not import torch until a torch dtype is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from weft.errors import Unsupported, nearest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type.

    bytes: of one element. accumulator: the dtype in which sums of products grow. result: the dtype
    that a GEMM library gives for operands of this dtype if nothing else is asked for. rated: the
    dtype whose GEMM rate a machine's description gives (None: it cannot be multiplied). channel:
    its number in `native/sums.h`. kernel: its number in `native/fused.h`. triton: its name in a
    Triton signature. scalar_type: its number in torch (c10::ScalarType), by which torch hands a
    list of dtypes to a kernel. published: its name in tables of published measurements. operators:
    whether the operators take it on a host.
    """

    name: str
    bytes: int
    accumulator: str
    result: str
    rated: str | None = None
    channel: int | None = None
    kernel: int | None = None
    triton: str | None = None
    scalar_type: int | None = None
    published: str | None = None
    operators: bool = False

    @property
    def torch(self) -> torch.dtype:
        """The dtype of torch; the kinds of float8 that only machines know have none."""
        import torch

        found = getattr(torch, self.name, None)
        if not isinstance(found, torch.dtype):
            raise Unsupported(f"torch has no dtype {self.name}; use float8_e4m3fn or float8_e5m2")
        return found


def _float(name: str, num_bytes: int, channel: int | None = None, **more: object) -> Dtype:
    accumulator = "float64" if num_bytes == 8 else "float32"
    result = name if num_bytes > 1 else "bfloat16"
    return Dtype(name, num_bytes, accumulator, result, channel=channel, **more)  # type: ignore[arg-type]


def _integer(name: str, num_bytes: int, channel: int) -> Dtype:
    return Dtype(name, num_bytes, name, name, channel=channel)


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        _float("float64", 8, 0, rated="float64", operators=True),
        _float(
            "float32",
            4,
            1,
            rated="float32",
            kernel=0,
            triton="fp32",
            scalar_type=6,
            operators=True,
        ),
        _float(
            "bfloat16",
            2,
            3,
            rated="bfloat16",
            kernel=1,
            triton="bf16",
            scalar_type=15,
            published="bf16",
            operators=True,
        ),
        _float(
            "float16",
            2,
            2,
            rated="float16",
            kernel=2,
            triton="fp16",
            scalar_type=5,
            operators=True,
        ),
        _float("float8", 1, rated="float8"),  # either kind, where only rate and bytes count
        Dtype("int8", 1, "int32", "bfloat16", "int8", channel=4, kernel=3, published="int8"),
        _float("float8_e4m3fn", 1, rated="float8"),
        _float("float8_e5m2", 1, rated="float8"),
        _float("float8_blockscale", 1, rated="float8_blockscale", published="fp8-blockscale"),
        _integer("uint8", 1, 5),
        _integer("int16", 2, 6),
        _integer("int32", 4, 7),
        _integer("int64", 8, 8),
        _integer("bool", 1, 9),
    )
}
"""All dtypes by name."""

ITEM_BYTES: dict[str, int] = {name: dtype.bytes for name, dtype in DTYPES.items()}
"""Bytes of one element, by name."""

MULTIPLIED: tuple[str, ...] = tuple(d.name for d in DTYPES.values() if d.rated is not None)
"""What can be multiplied, on some machine."""

NARROW: tuple[str, ...] = tuple(n for n in MULTIPLIED if DTYPES[n].accumulator != n)
"""What is too short to hold partial sums: these grow in the accumulator and are rounded once."""

ON_HOST: tuple[str, ...] = tuple(d.name for d in DTYPES.values() if d.operators)
"""What the operators take on a host."""

PUBLISHED: dict[str, str] = {d.published: d.name for d in DTYPES.values() if d.published}
"""Names by the names in tables of published measurements."""


def find(name: str) -> Dtype:
    """The dtype of that name."""
    if name not in DTYPES:
        raise Unsupported(f"there is no dtype {name!r}{nearest(name, DTYPES)}")
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    """The name of a torch dtype, whether or not it is in the table."""
    return str(dtype).removeprefix("torch.")


def accumulator(name: str) -> str:
    """The dtype in which a sum grows that is then rounded to the dtype of that name."""
    return find(name).accumulator


def rated(name: str) -> str:
    """The dtype whose GEMM rate describes this one on a machine. A name without a rate stays as it
    is, so that the machine that has none for it says so."""
    return (DTYPES[name].rated if name in DTYPES else None) or name


@cache
def on_host() -> dict[torch.dtype, str]:
    """The names of what the operators take on a host, by torch dtype."""
    return {DTYPES[name].torch: name for name in ON_HOST}


@cache
def summed_in_float32() -> dict[torch.dtype, str]:
    """The names of what the operators take on a host and sum in float32, by torch dtype."""
    return {dtype: name for dtype, name in on_host().items() if accumulator(name) == "float32"}


@cache
def float8() -> dict[torch.dtype, str]:
    """The names of torch's kinds of float8 that can be multiplied, by torch dtype."""
    return {DTYPES[name].torch: name for name in ("float8_e4m3fn", "float8_e5m2")}


@cache
def scalar_types() -> dict[int, torch.dtype]:
    """The dtypes of results by their number in torch."""
    return {d.scalar_type: d.torch for d in DTYPES.values() if d.scalar_type is not None}


@cache
def in_triton() -> dict[torch.dtype, str]:
    """The names in a Triton signature of what Triton kernels take, by torch dtype."""
    return {d.torch: d.triton for d in DTYPES.values() if d.triton is not None}


@cache
def channel_numbers() -> dict[torch.dtype, int]:
    """The numbers of the native channel, by torch dtype."""
    return {d.torch: d.channel for d in DTYPES.values() if d.channel is not None}


@cache
def kernel_numbers() -> dict[torch.dtype, int]:
    """The numbers of the native kernels, by torch dtype."""
    return {d.torch: d.kernel for d in DTYPES.values() if d.kernel is not None}
