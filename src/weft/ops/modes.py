"""Operators inside torch's modes: autocast, the transforms of torch.func, forward-mode
differentiation.

Under `torch.autocast`, operands are cast as for `torch.mm`. Transforms (vmap, grad, jvp) and
forward-mode differentiation are refused on every rank, and the group can still be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from weft.errors import Unsupported
from weft.run.call import PLAIN, dispatch_modes, in_transform

AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
TRANSFORMS = "FuncTorchDynamicLayerFrontMode"
"""The dispatch key that torch sets while a transform is active. It comes before all others."""

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def plain(arguments: Iterable[Any]) -> bool:
    """Whether all tensors among the arguments are plain ones on the CPU, and no mode of torch looks
    at operators. Then nothing is lost if a call does not go through the dispatcher of torch."""
    if dispatch_modes() or _function_modes():
        return False
    for argument in arguments:
        kind = type(argument)
        if kind in PLAIN:
            if not argument.is_cpu:
                return False
        elif kind is list or kind is tuple:
            for one in argument:
                if isinstance(one, torch.Tensor) and not (type(one) in PLAIN and one.is_cpu):
                    return False
        elif isinstance(argument, torch.Tensor):
            return False
    return True


def active() -> bool:
    """Whether a mode is active in which a call must go through the dispatcher of torch."""
    return torch._C._is_any_autocast_enabled() or in_transform()


def casts(operator: Any, device: str, count: int) -> Callable[..., Any]:
    """The autocast kernel of an operator, which casts its first `count` arguments, if they are
    floating-point tensors (or lists of them) narrower than float64."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST[device]))

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        given = [autocast(argument, device) for argument in arguments[:count]]
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*given, *arguments[count:], **keywords)

    return kernel


def autocast(value: Any, device: str = "cpu") -> Any:
    """A tensor (or a list of tensors) in the dtype that autocast gives to the operands of a
    product; unchanged if autocast is off."""
    if not torch.is_autocast_enabled(device):
        return value
    if isinstance(value, (list, tuple)):
        return [autocast(item, device) for item in value]
    known = isinstance(value, torch.Tensor) and value.device.type == device
    if not known or not value.is_floating_point() or value.dtype == torch.float64:
        return value
    return value.to(torch.get_autocast_dtype(device))


def without_negated(value: Any) -> Any:
    """A tensor (or a list of tensors) whose memory holds its values. torch negates some views when
    it reads them: the imaginary parts of conjugates."""
    if isinstance(value, torch.Tensor):
        return value.resolve_neg() if value.is_neg() else value
    if type(value) is list and any(isinstance(t, torch.Tensor) and t.is_neg() for t in value):
        return [without_negated(item) for item in value]
    return value


def check_tangents(arguments: Any) -> None:
    """Raises if a tensor has a tangent of forward-mode differentiation, which would be lost."""
    if forward_ad._current_level < 0:
        return
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            check_tangents(argument)
        elif isinstance(argument, torch.Tensor) and _has_tangent(argument):
            raise Unsupported(
                "an input has a tangent, and weft has no forward-mode differentiation; use "
                "torch.autograd.grad or loss.backward()"
            )


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
