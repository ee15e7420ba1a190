"""Sequence parallelism for the layers of a model: between attention and MLP, every rank holds its
part of the sequence.

Activations between the first and the last layer are DTensors with Shard(1), whose shape is that of
the whole sequence. Sharded projections gather them inside their products, and the products behind
them are summed and scattered. A sequence that the ranks cannot divide evenly, such as the one token
of a decoding step, stays whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from weft.errors import Unsupported
from weft.nn.sharded import Quick, Rows
from weft.nn.sharding import instead
from weft.ops.replicated import part, shared, whole

_SEQUENCE = 1
"""The dimension of the sequence in activations [batch, sequence, size]."""


def layers_of(model: nn.Module, names: list[str]) -> nn.ModuleList:
    """The list of layers to which the names of a plan belong."""
    prefixes = {name[: name.index(".*")] for name in names if ".*" in name}
    found = [model.get_submodule(prefix) for prefix in prefixes]
    if len(found) != 1 or not isinstance(found[0], nn.ModuleList) or len(found[0]) == 0:
        raise Unsupported(
            "sequence_parallel needs a model with one list of layers that the plan divides; "
            "leave it out, or use weft.nn.SequenceParallel and the other styles"
        )
    return found[0]


def split_sequence(
    layers: nn.ModuleList, styled: dict[nn.Module, Any], by: Quick
) -> set[nn.Module]:
    """Divides the sequence between layers. styled: the style of every sharded module; that of a
    row-wise layer is its `Rows`. Returns the blocks that gather the sequence before they
    compute."""
    gathering: set[nn.Module] = set()
    for layer in layers:
        children: list[Any] = list(layer.children())
        for child in children:
            if _is_pointwise(child):
                child.forward = partial(_on_stream, child, by)
            elif _is_overlapped(child, styled):
                rows = [styled[m] for m in child.modules() if isinstance(styled.get(m), Rows)]
                child.register_forward_pre_hook(partial(_announce, rows), with_kwargs=True)
                for inner in child.modules():
                    if isinstance(inner, nn.Dropout):
                        vars(inner)["forward"] = partial(_on_stream, inner, by)
            elif any(True for _ in child.parameters()):
                gathering.add(child)
                _Around(by).install(child)
    layers[0].register_forward_pre_hook(partial(_enter, by), with_kwargs=True)
    layers[-1].register_forward_hook(partial(_leave, by))
    return gathering


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a module treats every position of the sequence alone."""
    named = "norm" in type(module).__name__.lower()
    return named or isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.Dropout))


def _is_overlapped(block: nn.Module, styled: dict[nn.Module, Any]) -> bool:
    """Whether all layers of a block are sharded, so that the first gather and the last scatter."""
    holders = [m for m in block.modules() if any(p is not None for p in m._parameters.values())]
    known = all(m in styled for m in holders)
    return known and any(isinstance(styled.get(m), Rows) for m in holders)


def _enter(by: Quick, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if isinstance(x, DTensor) or x.dim() != 3 or x.shape[_SEQUENCE] % by.mesh.size():
        return None
    return _with(args, kwargs, _placed(part(x, _SEQUENCE, by), by))


def _leave(by: Quick, layer: nn.Module, args: Any, output: Any) -> Any:
    return _mapped(output, lambda y: _unplaced(y, by))


def _announce(rows: list[Rows], block: nn.Module, args: Any, kwargs: Any) -> None:
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    for style in rows:
        style.sequence = isinstance(x, DTensor)


def _on_stream(module: nn.Module, by: Quick, x: Any, *rest: Any) -> Any:
    """A pointwise module on this rank's part of the sequence."""
    if not isinstance(x, DTensor):
        return type(module).forward(module, x, *rest)
    values = {}
    if torch.is_grad_enabled():
        values = {name: shared(p, by) for name, p in module._parameters.items() if p is not None}
    with instead(module, values):
        return _placed(type(module).forward(module, x.to_local(), *rest), by)


class _Around:
    """Gathers the sequence before a block and divides it behind it."""

    def __init__(self, by: Quick) -> None:
        self._by, self._gathered = by, False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Around:
        return _Around(self._by)

    def install(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self.before, with_kwargs=True)
        block.register_forward_hook(self.behind)

    def before(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._gathered = isinstance(x, DTensor)
        return _with(args, kwargs, _unplaced(x, self._by)) if self._gathered else None

    def behind(self, block: nn.Module, args: Any, output: Any) -> Any:
        if not self._gathered:
            return None
        return _mapped(output, lambda y: _placed(part(y, _SEQUENCE, self._by), self._by))


def _placed(x: torch.Tensor, by: Quick) -> DTensor:
    return DTensor.from_local(x, by.mesh, [Shard(_SEQUENCE)], run_check=False)


def _unplaced(x: Any, by: Quick) -> Any:
    if not isinstance(x, DTensor):
        return x
    return whole(x.to_local(), _SEQUENCE, x.shape[_SEQUENCE], by)


def _with(args: Any, kwargs: Any, x: Any) -> Any:
    """The arguments of a call with other activations."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": x}
    return (x, *args[1:]), kwargs


def _mapped(output: Any, change: Any) -> Any:
    """An output in which the activations, its first tensor, are changed."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)
