"""Autograd of operators in eager mode: one `torch.autograd.Function` for all of them.

`torch.library.register_autograd` serves graphs, fake tensors and tensor subclasses. It also takes
arguments of any structure apart and puts them together again, which takes several times as long
as a small product. The arguments of an operator are tensors, lists of tensors and values, and its
schema says which is which, so for plain tensors this is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._library.autograd import Info, make_autograd_impl

from weft.ops import modes

_any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad


class Gradient(NamedTuple):
    """What autograd needs to know of an operator.

    kernel, setup_context and backward: see `Operator`. tensors: the places of the tensors among the
    arguments, and whether each is a list. defaults: of all arguments that are not keyword-only, and
    of those that are. listed: which results are lists; None if the result is a single tensor.
    """

    kernel: Callable[..., Any]
    setup_context: Callable[..., None]
    backward: Callable[..., Any]
    tensors: tuple[tuple[int, bool], ...]
    defaults: tuple[Any, ...]
    keyword_defaults: dict[str, Any]
    listed: tuple[bool, ...] | None


def gradient_of(
    schema: Any,
    kernel: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> Gradient:
    """The gradient of an operator with a schema of torch."""
    arguments = [one for one in schema.arguments if not one.kwarg_only]
    kinds = [str(one.type) for one in arguments]
    returned = [str(one.type).startswith("List") for one in schema.returns]
    return Gradient(
        kernel,
        setup_context,
        backward,
        tuple((i, kind.startswith("List")) for i, kind in enumerate(kinds) if "Tensor" in kind),
        tuple(one.default_value for one in arguments),
        {one.name: one.default_value for one in schema.arguments if one.kwarg_only},
        None if returned == [False] else tuple(returned),
    )


def autograd_kernel(overload: Any, gradient: Gradient) -> Callable[..., Any]:
    """The kernel of an operator for the Autograd keys of the dispatcher."""
    registered = make_autograd_impl(overload, Info(gradient.backward, gradient.setup_context))
    kernel = gradient.kernel

    def recorded_or_not(keyset: Any, *positional: Any, **keywords: Any) -> Any:
        if not modes.plain(positional):
            return registered(keyset, *positional, **keywords)
        if torch.is_grad_enabled() and _any_requires_grad(*positional):
            return record(gradient, positional, keywords)
        return kernel(*positional, **keywords)

    return recorded_or_not


def record(gradient: Gradient, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A call of an operator with plain tensors, recorded by autograd."""
    positional += gradient.defaults[len(positional) :]
    keywords = {**gradient.keyword_defaults, **keywords}
    tensors: list[torch.Tensor | None] = []
    for at, is_list in gradient.tensors:
        if is_list:
            tensors += positional[at]
        else:
            tensors.append(positional[at])
    made = _apply(gradient, positional, keywords, *tensors)
    listed = gradient.listed
    return made if listed is None else _structured(listed, made)


class _Recorded(torch.autograd.Function):
    """The arguments that are tensors come one by one, because autograd knows no lists."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Gradient,
        positional: tuple[Any, ...],
        keywords: dict[str, Any],
        *_: torch.Tensor | None,
    ) -> Any:
        made = gradient.kernel(*positional, **keywords)
        gradient.setup_context(ctx, positional, keywords, made)
        ctx.weft_gradient = gradient
        ctx.weft_sizes = [
            len(positional[at]) if is_list else -1 for at, is_list in gradient.tensors
        ]
        if gradient.listed is None:
            return made
        if type(made) is list:
            return tuple(made)
        flat: list[torch.Tensor | None] = []
        for one, is_list in zip(made, gradient.listed, strict=True):
            if is_list:
                flat += one
            else:
                flat.append(one)
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient: Gradient = ctx.weft_gradient
        if gradient.listed is not None:
            made = _structured(gradient.listed, grads)
            grads = made if type(made) is tuple else (made,)
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = _needed(gradient, ctx.weft_sizes, needed[3:])
        try:
            found = gradient.backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = needed
        flat: list[torch.Tensor | None] = [None, None, None]
        for (at, is_list), size in zip(gradient.tensors, ctx.weft_sizes, strict=True):
            if is_list:
                flat += [None] * size if found[at] is None else found[at]
            else:
                flat.append(found[at])
        return tuple(flat)


_apply: Callable[..., Any] = super(torch.autograd.Function, _Recorded).apply
"""Without what `Function.apply` does for transforms of torch.func, which do not come here."""


def _structured(listed: tuple[bool, ...], flat: Sequence[Any]) -> Any:
    """The results of an operator, or their gradients, from one sequence of all tensors. Only the
    last result is a list."""
    if listed == (True,):
        return list(flat)
    return (flat[0], list(flat[1:])) if listed[-1] else tuple(flat)


def _needed(gradient: Gradient, sizes: Sequence[int], flat: Sequence[bool]) -> list[Any]:
    """Which arguments need a gradient, in the structure of the arguments."""
    needed: list[Any] = [False] * len(gradient.defaults)
    at = 0
    for (place, is_list), size in zip(gradient.tensors, sizes, strict=True):
        needed[place] = list(flat[at : at + size]) if is_list else flat[at]
        at += size if is_list else 1
    return needed
