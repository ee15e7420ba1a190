"""A matmul and a collective that do not need each other, side by side under a strategy (C3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric.proposal import Proposal
from weft.ops.aliasing import check_apart
from weft.ops.operands import check_operands, check_out, dtype_name
from weft.ops.operator import Bound, Operator, register, run, session_for
from weft.plan.concurrent import COLLECTIVES, Collective, Concurrent
from weft.run.call import Tensors, check_tensor
from weft.run.results import empty_as
from weft.run.session import Session
from weft.select.decide import Decision
from weft.strategy import Strategy


def matmul_beside(
    a: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    *,
    collective: Collective = "all_gather",
    strategy: str | Strategy = "dma",
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplies a by b while a collective moves the rows of x, as FSDP gathers weights beside a
    GEMM.

    Equals, on every rank::

        handle = torch.distributed.all_gather(pieces, x, group, async_op=True)  # or all_to_all
        y = a @ b
        handle.wait()
        received = torch.cat([piece for peer, piece in enumerate(pieces) if peer != rank])

    Args:
        a: [M, K] of this rank.
        b: [K, N] of this rank.
        x: [rows, columns] of this rank, in the dtype of a and b. An all-gather sends all of it to
            every peer, an all-to-all the parts of `torch.tensor_split(x, world)`.
        collective: "all_gather" or "all_to_all".
        strategy: what moves the bytes, and the order and priority of the two, e.g. "dma" or
            "concurrent". Here it decides about engines and order;
            `weft.run.placement.Placement` sets cores and priorities.
        group: a torch.distributed group whose ranks share this machine; None is all ranks.
        out: the tensor for y.

    Returns:
        y [M, N], and the rows from the peers, in the order of ranks, without this rank's own.
    """
    made: tuple[torch.Tensor, torch.Tensor] = run(
        OPERATOR, session_for(group, a), strategy, a, b, x, collective, out
    )
    return made


def _bind(
    session: Session,
    a: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    collective: Collective,
    out: torch.Tensor | None,
) -> Bound:
    if collective not in COLLECTIVES:
        raise Unsupported(f"collective must be {' or '.join(COLLECTIVES)}, not {collective!r}")
    check_tensor("a", a, (2,))
    check_operands("a", a, [b])
    check_tensor("x", x, (2,))
    if x.dtype != a.dtype:
        raise Unsupported(f"x is {x.dtype} and a is {a.dtype}; cast one to the other's dtype")
    if out is not None:
        check_out("out", out, a, [b], b.shape[1], a.shape[0], "a")
        check_apart("out", out, [("x", x)])
    sizes, dtype = (a.shape[0], b.shape[1], a.shape[1]), dtype_name(a.dtype)
    rank, world = session.fabric.rank, session.fabric.world

    def outputs(operation: Any) -> Tensors:
        return {
            "c": empty_as(a, (operation.m, operation.n)) if out is None else out,
            "received": empty_as(x, (operation.num_received(rank), operation.columns)),
        }

    same = (
        ("M, N, K", sizes),
        ("dtype", dtype),
        ("the collective", collective),
        ("the columns of x", x.shape[1]),
    )
    return Bound(
        same,
        (("rows", x.shape[0]),),
        same,
        lambda: Concurrent(*sizes, collective, (x.shape[0],) * world, x.shape[1], dtype),
        {"a": a, "b": b, "x": x.contiguous()},
        lambda results: (results["c"], results["received"]),
        ("x",),
        outputs,
    )


def _combine(proposals: Sequence[Proposal]) -> Concurrent:
    """The operation that the proposals of all ranks make together."""
    same = dict(proposals[0].same)
    m, n, k = same["M, N, K"]
    rows = tuple(dict(proposal.own)["rows"] for proposal in proposals)
    return Concurrent(
        m, n, k, same["the collective"], rows, same["the columns of x"], same["dtype"]
    )


def _asked(strategy: object) -> Decision:
    chosen = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(chosen, Strategy):
        raise Unsupported(f"strategy must be a name or a Strategy, not {type(strategy).__name__}")
    return Decision(chosen.name, chosen.name, chosen, "asked for")


OPERATOR = register(
    Operator(name="matmul_beside", operation=Concurrent, bind=_bind, combine=_combine, asked=_asked)
)
