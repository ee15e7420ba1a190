"""PyTorch's fused operators (`torch.ops.symm_mem.*`), implemented by weft: on CPU groups, where
PyTorch has none, and on request on devices in place of PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from weft.errors import Unsupported, nearest

KEYS = {"cuda": "CUDA", "xpu": "XPU", "loom": "PrivateUse1"}
"""The dispatch keys of devices. torch calls ROCm's devices cuda."""

_library: torch.library.Library | None = None
_users = 0


class SymmMemCompat:
    """Routes the operators to weft until `undo()` or the end of its `with` block."""

    def __init__(self, devices: Sequence[str] = ()) -> None:
        global _users
        for device in devices:
            if device not in KEYS:
                raise Unsupported(
                    f"there is no device {device!r}{nearest(device, KEYS)}; use {', '.join(KEYS)}"
                )
        self._active = True
        _users += 1
        if _users == 1:
            _route()
        self._replaced = _replace(devices) if devices else None

    def undo(self) -> None:
        """Ends the routing, unless another one is still active, and gives the devices back to
        PyTorch's own operators. A second call does nothing."""
        global _library, _users
        if not self._active:
            return
        self._active = False
        if self._replaced is not None:
            self._replaced._destroy()  # type: ignore[no-untyped-call]
        _users -= 1
        if _users == 0 and _library is not None:
            _library._destroy()  # type: ignore[no-untyped-call]
            _library = None

    def __enter__(self) -> SymmMemCompat:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def symm_mem_compat(devices: Sequence[str] = ()) -> SymmMemCompat:
    """Routes PyTorch's fused operators to weft in this process: for CPU tensors, with gradients,
    and for the devices that are named.

    While it is active, these are equal::

        torch.ops.symm_mem.fused_all_gather_matmul(A, Bs, gather_dim, group_name)
        weft.all_gather_matmul(A, Bs, gather_dim=gather_dim, return_gathered=True)

        torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, "sum", scatter_dim, group_name)
        weft.matmul_reduce_scatter(A, B, scatter_dim=scatter_dim)

    and so are `fused_all_gather_scaled_matmul` and `weft.all_gather_scaled_matmul`, and
    `fused_scaled_matmul_reduce_scatter` and `weft.scaled_matmul_reduce_scatter`.

    Args:
        devices: types of device, such as ["cuda"], whose operators of PyTorch are replaced too.
            What is written for these operators (Inductor's micro-pipeline pass, vLLM's
            asynchronous tensor parallelism, torchtitan) then runs on weft.

    Returns:
        an object with `undo()`, which is also a context manager.
    """
    return SymmMemCompat(devices)


def _route() -> None:
    global _library
    import torch.distributed._symmetric_memory  # defines the operators

    _library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in OPERATORS.items():
        # A composite of weft's operators also has their gradients.
        _library.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _replace(devices: Sequence[str]) -> torch.library.Library:
    """Puts weft before PyTorch's own kernels of these devices, which come back when the library is
    destroyed."""
    library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    for device in dict.fromkeys(devices):
        for name, function in OPERATORS.items():
            # Calls that autograd sees get the gradients of weft's operators; compiled graphs call
            # below it.
            for key in (f"Autograd{KEYS[device]}", KEYS[device]):
                library.impl(name, function, key)  # type: ignore[no-untyped-call]
    return library


def _all_gather_matmul(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,  # noqa: N803 - the name in torch.ops.symm_mem
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    gathered, ys = torch.ops.weft.all_gather_matmul(
        a, bs, gather_dim, group_name, return_A=return_A
    )
    return (gathered if return_A else None), ys


def _matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.weft.matmul_reduce_scatter(a, b, reduce_op, scatter_dim, group_name)
    return y


def _all_gather_scaled_matmul(*arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    found: tuple[torch.Tensor, list[torch.Tensor]] = torch.ops.weft.all_gather_scaled_matmul(
        *arguments
    )
    return found


def _scaled_matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """The graph may have flattened a to two dimensions; `output_shape` has what it had before."""
    dim = scatter_dim_after_maybe_reshape
    if output_shape is not None and len(output_shape) > a.dim():
        dim = orig_scatter_dim
        a = a.view(*output_shape[:-1], a.shape[-1])
        if a_scale.numel() > 1:
            a_scale = a_scale.view(*output_shape[:-1], 1)
    y: torch.Tensor = torch.ops.weft.scaled_matmul_reduce_scatter(
        a,
        b,
        a_scale,
        b_scale,
        reduce_op,
        dim,
        group_name,
        bias,
        result_scale,
        out_dtype,
        use_fast_accum,
    )
    return y


OPERATORS: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _all_gather_matmul,
    "fused_matmul_reduce_scatter": _matmul_reduce_scatter,
    "fused_all_gather_scaled_matmul": _all_gather_scaled_matmul,
    "fused_scaled_matmul_reduce_scatter": _scaled_matmul_reduce_scatter,
}
