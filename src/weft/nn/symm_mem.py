"""PyTorch's fused operators (`torch.ops.symm_mem.*`) on CPU groups, implemented by weft. PyTorch
has no CPU implementation of them."""

from __future__ import annotations

from types import TracebackType

import torch

_library: torch.library.Library | None = None
_users = 0


class SymmMemCompat:
    """Routes the operators to weft until `undo()` or the end of its `with` block."""

    def __init__(self) -> None:
        global _users
        self._active = True
        _users += 1
        if _users == 1:
            _route()

    def undo(self) -> None:
        """Ends the routing, unless another one is still active. A second call does nothing."""
        global _library, _users
        if not self._active:
            return
        self._active = False
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


def symm_mem_compat() -> SymmMemCompat:
    """Routes PyTorch's fused operators to weft for CPU tensors, with gradients, in this process.

    While it is active, these are equal::

        torch.ops.symm_mem.fused_all_gather_matmul(A, Bs, gather_dim, group_name)
        weft.all_gather_matmul(A, Bs, gather_dim=gather_dim, return_gathered=True)

        torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, "sum", scatter_dim, group_name)
        weft.matmul_reduce_scatter(A, B, scatter_dim=scatter_dim)

    Returns:
        an object with `undo()`, which is also a context manager.
    """
    return SymmMemCompat()


def _route() -> None:
    global _library
    import torch.distributed._symmetric_memory  # defines the operators

    _library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in (
        ("fused_all_gather_matmul", _all_gather_matmul),
        ("fused_matmul_reduce_scatter", _matmul_reduce_scatter),
    ):
        # A composite of weft's operators also has their gradients.
        _library.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


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
