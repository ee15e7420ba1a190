"""Compiles the kernels for GPUs without having them, and reads the resources of the machine
code."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.dtype import in_triton, name_of
from weft.errors import Unsupported, nearest
from weft.triton.gemv_all_reduce import GPU_TILES
from weft.triton.jit import JitKernel
from weft.triton.kernels.all_gather_gemm import all_gather_gemm
from weft.triton.kernels.all_gather_gemm_claim import all_gather_gemm_claim
from weft.triton.kernels.embedding_all_to_all import embedding_all_to_all
from weft.triton.kernels.gemm_all_to_all import gemm_all_to_all
from weft.triton.kernels.gemv_all_reduce import gemv_all_reduce
from weft.triton.residency import Resources
from weft.triton.resident_launch import DTYPES, Tiles

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}
"""MI300X, MI355X, H100, B200."""

KERNELS: dict[str, JitKernel] = {
    "embedding_all_to_all": embedding_all_to_all,
    "gemv_all_reduce": gemv_all_reduce,
    "gemm_all_to_all": gemm_all_to_all,
    "all_gather_gemm": all_gather_gemm,
    "all_gather_gemm_claim": all_gather_gemm_claim,
}

DTYPE_NAMES = {name_of(dtype): dtype for dtype in DTYPES}

_ELEMENTS = frozenset({"x", "w", "y", "out", "shard", "gathered", "weights"})
_OTHER_POINTERS = {
    **dict.fromkeys(("tables", "heights", "widths", "targets", "firsts", "pieces"), "*i64"),
    **dict.fromkeys(("indices", "offsets", "arrived", "made", "summed"), "*i64"),
    **dict.fromkeys(("bases", "expected", "status"), "*i64"),
    **dict.fromkeys(("routes", "chunks", "claims"), "*i32"),
    "inbox": "*fp32",
}
_ALIGNED = frozenset(
    {"N", "K", "x_stride", "w_stride_k", "shard_stride", "gathered_stride", "out_stride"}
)
"""Sizes that are assumed to be multiples of 16, as in usual layers. A launch with other sizes
compiles a version of its own."""


@dataclass(frozen=True)
class Build:
    """A kernel compiled for a target: its assembly, and the resources of one program."""

    kernel: str
    target: str
    dtype: str
    assembly: str
    resources: Resources


def default_tiles(kernel: str, target: str, dtype: torch.dtype) -> Tiles:
    """The tiles of a launch on such a GPU."""
    if kernel == "gemv_all_reduce":
        return GPU_TILES
    return Tiles(k=64 if dtype.itemsize == 2 else 32)


def build(
    kernel: str,
    target: str,
    dtype: torch.dtype | str,
    tiles: Tiles | None = None,
    counter_bits: int = 64,
) -> Build:
    """Compiles one kernel; no GPU is needed. counter_bits: 32 for the words of the device
    fabric."""
    for name, known in ((kernel, KERNELS), (target, TARGETS)):
        if name not in known:
            raise Unsupported(f"there is no {name!r}{nearest(name, known)}; use {', '.join(known)}")
    if isinstance(dtype, str):
        if dtype not in DTYPE_NAMES:
            raise Unsupported(f"there is no dtype {dtype!r}; use {', '.join(DTYPE_NAMES)}")
        dtype = DTYPE_NAMES[dtype]
    tiles = tiles or default_tiles(kernel, target, dtype)
    function = KERNELS[kernel]
    constants = _constants(tiles)
    source = _source(function, dtype, constants, {"counters": f"*i{counter_bits}"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = tiles.options if kernel != "embedding_all_to_all" else {"num_warps": 4}
        options = {**options, "launch_cooperative_grid": True}
        compiled = triton.compile(source, target=TARGETS[target], options=options)
    cuda = TARGETS[target].backend == "cuda"
    assembly: str = compiled.asm["ptx" if cuda else "amdgcn"]
    read: Callable[[Any], tuple[int | None, int | None]] = _read_cubin if cuda else _read_amdgcn
    registers, spilled = read(compiled)
    taken = Resources(registers, spilled, compiled.metadata.shared, compiled.metadata.num_warps)
    return Build(kernel, target, name_of(dtype), assembly, taken)


def _constants(tiles: Tiles) -> dict[str, Any]:
    return {
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "BLOCK_B": 16,
        "BLOCK_D": 64,
        "MEAN": False,
        "WEIGHTED": False,
        "PRECISION": "ieee",
        "w_stride_n": 1,
    }


def _source(
    function: JitKernel, dtype: torch.dtype, constants: dict[str, Any], pointers: dict[str, str]
) -> Any:
    """The kernel with the types of its arguments in a launch with contiguous tensors."""
    signature: dict[str, str] = {}
    for name in inspect.signature(function.fn).parameters:
        if name in constants:
            signature[name] = "constexpr"
        elif name in _ELEMENTS:
            signature[name] = "*" + in_triton()[dtype]
        else:
            signature[name] = (_OTHER_POINTERS | pointers).get(name, "i32")
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in _ALIGNED
    }
    known = {name: value for name, value in constants.items() if name in signature}
    return ASTSource(function, signature, constexprs=known, attrs=aligned)


def _read_amdgcn(compiled: Any) -> tuple[int | None, int | None]:
    """Registers of a lane (vector and accumulation registers are one file) and spilled ones, from
    the metadata that the loader reads."""
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int | None:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", text, flags=re.MULTILINE)
        return int(found[1]) if found else None

    # Scalar registers spill into lanes of vector registers, which are counted already.
    return number("vgpr_count"), number("vgpr_spill_count")


def _read_cubin(compiled: Any) -> tuple[int | None, int | None]:
    """Registers of a lane and bytes of stack, from the cuobjdump of Triton, if there is one.
    NVIDIA's assembler decides on both, so PTX does not contain them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    registers = re.search(r"REG:(\d+)", done.stdout)
    stack = re.search(r"STACK:(\d+)", done.stdout)
    return (int(registers[1]) if registers else None, int(stack[1]) if stack else None)
