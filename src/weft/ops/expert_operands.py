"""Shared by operators with several experts per rank: checks of weights and splits, and gradients by
expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import Mismatch, Unsupported
from weft.ops.operands import are_sizes, dtype_name, named
from weft.run.call import check_tensor

Splits = Any
"""A list with one size per rank, or per rank and expert (nested or flat), or a tensor of them."""


def as_sizes(splits: Splits) -> Any:
    """Splits as one flat list of sizes. What cannot be splits is left as it is, to be refused on
    every rank."""
    if isinstance(splits, torch.Tensor):
        try:
            return splits.flatten().tolist() if not splits.is_floating_point() else splits
        except RuntimeError:  # it has no values
            return splits
    if isinstance(splits, Sequence) and not isinstance(splits, str):
        if any(isinstance(part, torch.Tensor) or _is_list(part) for part in splits):
            parts = [as_sizes(part) for part in splits]
            return [size for part in parts for size in part] if all(map(_is_list, parts)) else parts
        return list(splits)
    return splits


def _is_list(part: object) -> bool:
    return isinstance(part, Sequence) and not isinstance(part, str)


def has_experts(w: object) -> bool:
    """Whether weights are several, or have an expert dimension."""
    return not isinstance(w, torch.Tensor) or w.dim() == 3


def as_experts(w: Any) -> list[Any]:
    """The weights as a list of [E, K, N]; a weight [K, N] is that of one expert."""
    listed = [w] if isinstance(w, torch.Tensor) or not isinstance(w, Sequence) else list(w)
    return [t.unsqueeze(0) if isinstance(t, torch.Tensor) and t.dim() == 2 else t for t in listed]


def check_weights(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """The number of experts. Raises unless x [rows, K] can be multiplied by every w [E, K, N]."""
    check_tensor("x", x, (2,))
    if not weights:
        raise Unsupported("w is empty; give at least one weight")
    for name, w in named("w", weights):
        check_tensor(name, w, (3,))
        if w.dtype != x.dtype:
            raise Unsupported(
                f"x is {dtype_name(x.dtype)} and {name} is {dtype_name(w.dtype)}; "
                "cast one to the dtype of the other"
            )
        if w.shape[1] != x.shape[1]:
            raise Unsupported(
                f"{name} is {list(w.shape)}, which is experts, K and N, but x has {x.shape[1]} "
                "columns; both are K and must be equal"
            )
        if w.shape[0] != weights[0].shape[0]:
            raise Unsupported(
                f"w[0] has {weights[0].shape[0]} experts and {name} has {w.shape[0]}; "
                "all weights belong to the same experts"
            )
    dtype_name(x.dtype)
    if weights[0].shape[0] == 0:
        raise Unsupported("w has no experts; every rank needs at least one")
    return weights[0].shape[0]


def check_expert_splits(
    name: str, splits: Splits, world: int, experts: int, rows: int
) -> tuple[int, ...]:
    """The rows to (or from) each rank and expert. Raises unless there is one size for each, and
    their sum is `rows` (below 0: any number)."""
    if not are_sizes(splits):
        raise Unsupported(
            f"{name} must have one size per rank and expert, as a list or an integer tensor, "
            f"not {splits!r}"
        )
    if len(splits) != world * experts:
        raise Unsupported(
            f"{name} has {len(splits)} sizes, but {world} ranks with {experts} experts each "
            f"need {world * experts}"
        )
    if min(splits) < 0:
        raise Unsupported(f"{name} has a size below zero: {min(splits)}")
    if sum(splits) != rows and rows >= 0:
        raise Unsupported(f"{name} adds up to {sum(splits)}, but there are {rows} rows")
    return tuple(splits)


def match_expert_splits(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], experts: int
) -> tuple[tuple[int, ...], ...]:
    """The in_splits of every rank, from the (in_splits, out_splits) of all ranks. Raises `Mismatch`
    unless they match for every pair of ranks and every expert."""
    for source, (sent, _) in enumerate(pairs):
        for target, (_, expected) in enumerate(pairs):
            for expert in range(experts):
                gives = sent[target * experts + expert]
                takes = expected[source * experts + expert]
                if gives != takes:
                    raise Mismatch(
                        f"ranks disagree on the splits: rank {source} sends {gives} rows of "
                        f"expert {expert} to rank {target}, which expects {takes}"
                    )
    return tuple(tuple(sent) for sent, _ in pairs)


def weight_gradient(
    rows: torch.Tensor, dy: torch.Tensor, taken: Sequence[int], experts: int
) -> torch.Tensor:
    """rows^T @ dy for every expert, [E, K, N]. taken: the rows from each rank and expert; rows are
    in the order of experts."""
    counts = [sum(taken[expert::experts]) for expert in range(experts)]
    made = rows.new_empty(experts, rows.shape[1], dy.shape[1])
    parts = torch.split(rows, counts), torch.split(dy, counts)
    for out, a, b in zip(made, *parts, strict=True):
        torch.mm(a.t(), b, out=out)
    return made
