"""Kernels as work of a device's stream, for the device fabric: launched on a GPU, and on loom
interpreted by the stream itself when it comes to them."""

from __future__ import annotations

from typing import Any

import torch

from weft.triton.jit import JitKernel
from weft.triton.kernels.all_gather_gemm_claim import all_gather_gemm_claim
from weft.triton.resident_launch import FOREVER, HOST_PROGRAMS, STATUS_WORDS, Tiles, resident

_grids: dict[tuple[JitKernel, torch.dtype, int | None], int] = {}


def new_status(device: torch.device) -> torch.Tensor:
    """Where kernels say that they gave up, and why: 0 as long as they have not."""
    return torch.zeros(STATUS_WORDS, dtype=torch.int64, device=device)


def all_gather_claims(
    *,
    shard: torch.Tensor,
    gathered: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    counters: torch.Tensor,
    **others: Any,
) -> None:
    """Enqueues y = x @ w on the current stream, chunk by chunk as they arrive. others: further
    arguments of the kernel. counters: one word for each chunk, in this rank's memory. They always
    come: engines post them, or the watchdog when the call is over. So polls have no limit of their
    own but that of a counter, which `status` reports."""
    loom = y.device.type == "loom"
    tiles = Tiles(32, 32, 32) if loom else Tiles(k=64 if y.dtype.itemsize == 2 else 32)
    arguments = {
        **others,
        "shard": shard,
        "gathered": gathered,
        "w": w,
        "y": y,
        "counters": counters,
        "N": w.shape[1],
        "K": w.shape[0],
        "shard_stride": shard.stride(0),
        "gathered_stride": gathered.stride(0),
        "w_stride_k": w.stride(0),
        "w_stride_n": w.stride(1),
        "counter_stride": 1,
        "spins": FOREVER,
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "PRECISION": "ieee",
    }
    if loom:
        from weft.triton import on_loom

        on_loom.launch(all_gather_gemm_claim, arguments, HOST_PROGRAMS)
    else:
        _launch(all_gather_gemm_claim, arguments, tiles.options, y)


def _launch(
    kernel: JitKernel, arguments: dict[str, Any], options: dict[str, int], y: torch.Tensor
) -> None:
    """Launches as many programs as fit at once, so that none waits for the place of another."""
    key = (kernel, y.dtype, y.device.index)
    if key not in _grids:
        _grids[key] = resident(kernel, y.device, arguments, options)
    kernel[(_grids[key],)](**arguments, launch_cooperative_grid=True, **options)
