"""Communication inside Triton kernels, and fused computation-collectives written with it.

The same kernel source is interpreted on the host, over memory that rank processes share, and
compiled for AMD and NVIDIA GPUs. docs/triton.md is the guide, the memory model and the proof.
"""

from __future__ import annotations

from weft.errors import Unsupported


class NotInstalled(Unsupported, ImportError):
    """Triton is not installed."""


try:
    from weft.triton.all_gather_gemm import AllGatherGemm
    from weft.triton.embedding_all_to_all import EmbeddingAllToAll
    from weft.triton.gemm_all_to_all import GemmAllToAll
    from weft.triton.gemv_all_reduce import GemvAllReduce
    from weft.triton.jit import kernel
    from weft.triton.language import get, peer, put, signal, signal_add, wait
    from weft.triton.resident_launch import Tiles
    from weft.triton.space import Host, Pointers, SymmetricMemory, symmetric_memory
except ModuleNotFoundError as missing:
    if (missing.name or "").split(".")[0] != "triton":
        raise
    raise NotInstalled(
        "weft.triton needs Triton, which is not installed; run: pip install 'weft[triton]'"
    ) from None

__all__ = [
    "AllGatherGemm",
    "EmbeddingAllToAll",
    "GemmAllToAll",
    "GemvAllReduce",
    "Host",
    "NotInstalled",
    "Pointers",
    "SymmetricMemory",
    "Tiles",
    "get",
    "kernel",
    "peer",
    "put",
    "signal",
    "signal_add",
    "symmetric_memory",
    "wait",
]
