"""The description of an operator, and its registration with torch and the rest of weft.

The file of an operator defines the function that users call and an `Operator`. Registration makes
it `torch.ops.weft.NAME`, with autograd and graph support on every device that has a fabric. The
command line, benchmarks and tests find operators with `operators()`. What the file of an operator
needs to make a call (`operator_call.py`) can be imported from here, too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import fabric as fabrics
from weft.ops import modes
from weft.ops.known import Output as Output
from weft.ops.operands import resolve_group
from weft.ops.operator_call import Bound as Bound
from weft.ops.operator_call import Renew as Renew
from weft.ops.operator_call import in_kernel as in_kernel
from weft.ops.operator_call import into as into
from weft.ops.operator_call import run as run
from weft.ops.operator_call import session_for as session_for
from weft.ops.recorded import Gradient, autograd_kernel, gradient_of, record
from weft.run.call import Combine, no_transforms
from weft.select.decide import AUTO, Decision, requested

library = torch.library.Library("weft", "FRAGMENT")  # type: ignore[no-untyped-call]
"""The library of `torch.ops.weft.*`."""


@dataclass(frozen=True)
class Operator:
    """Everything that distinguishes one operator from others.

    schema: of `torch.ops.weft.NAME`. bind: checks the arguments on this rank. combine: makes the
    operation from the proposals of all ranks, or raises `Mismatch`. kernel: takes the arguments of
    the schema (None: see `_kernel_of`); fake: returns their result without data. operation: the
    class of `weft.plan` that it runs. asked: the decision for a schedule argument; None if a
    schedule must be chosen. repeats: whether a call with arguments of the same layouts is a known
    call (`known.py`). casts: how many arguments of the schema, from the first, autocast casts.
    """

    name: str
    operation: type[Any]
    bind: Callable[..., Bound]
    combine: Combine
    schema: str = ""
    kernel: Callable[..., Any] | None = None
    fake: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    asked: Callable[[Any], Decision | None] = requested
    repeats: bool = False
    casts: int = 0


_operators: dict[str, Operator] = {}
_gradients: dict[str, Gradient] = {}
"""Of the operators that autograd records."""
_registered: dict[str, Any] = {}
"""`torch.ops.weft.NAME` of the operators with a schema, found once."""


def register(operator: Operator) -> Operator:
    """Registers an operator with torch and with the rest of weft."""
    _operators[operator.name] = operator
    if operator.schema:
        name, define = operator.name, library.define
        define(operator.schema)  # type: ignore[no-untyped-call]
        _registered[name] = getattr(torch.ops.weft, name)
        # For tensors of any device: the fabric of the device carries out the call.
        kernel = operator.kernel or _kernel_of(operator)
        library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"weft::{name}", operator.fake, lib=library)
        if operator.backward is not None and operator.setup_context is not None:
            overload = _registered[name].default
            gradient = gradient_of(
                overload._schema, kernel, operator.setup_context, operator.backward
            )
            _gradients[name] = gradient
            recorded = autograd_kernel(overload, gradient)
            library.impl(name, recorded, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        elif operator.backward is not None:
            torch.library.register_autograd(f"weft::{name}", operator.backward, lib=library)
        _register_modes(operator)
    return operator


def _kernel_of(operator: Operator) -> Callable[..., Any]:
    """The kernel of an operator that binds the arguments of its schema in their order, without the
    group and the schedule, and then an `out`, which a graph does not have."""
    arguments = _registered[operator.name].default._schema.arguments
    names = [argument.name for argument in arguments if not argument.kwarg_only]
    bound = [place for place, name in enumerate(names) if name != "group_name"]
    group = names.index("group_name")
    more = [
        (argument.name, argument.default_value)
        for argument in arguments
        if argument.kwarg_only and argument.name != "schedule"
    ]

    def kernel(*positional: Any, schedule: str = AUTO, **keywords: Any) -> Any:
        # torch leaves out keyword arguments that have their default value. Others have none.
        given = [positional[place] for place in bound]
        for name, default in more:
            given.append(keywords.get(name, default))
        session = session_for(resolve_group(positional[group]), positional[0])
        return _contiguous(run(operator, session, schedule, *given, None))

    return kernel


def _contiguous(made: Any) -> Any:
    """Results in the layout that a fake kernel declares, which a graph relies on."""
    if isinstance(made, torch.Tensor):
        return made.contiguous()
    return made if made is None else type(made)(map(_contiguous, made))


def through_torch(operator: Operator, *positional: Any, **keywords: Any) -> Any:
    """A call that autograd, a graph or a mode of torch must see (`operands.dispatched`). If only
    autograd must see it, the call does not go through the dispatcher, which would take longer than
    a small product."""
    if not torch.compiler.is_compiling() and not modes.active() and modes.plain(positional):
        return record(_gradients[operator.name], positional, keywords)
    return _registered[operator.name](*positional, **keywords)


def _register_modes(operator: Operator) -> None:
    """Registers what autocast and transforms of torch.func do with an operator."""
    name, impl = operator.name, library.impl
    overload = _registered[name].default
    names = [argument.name for argument in overload._schema.arguments]

    def refuse(*arguments: Any, **keywords: Any) -> None:
        error, given = no_transforms(f"weft.{name}"), dict(zip(names, arguments, strict=False))
        if "group_name" in given:
            fabrics.of(resolve_group(given["group_name"])).refuse(name, error)
        raise error

    impl(name, refuse, modes.TRANSFORMS)  # type: ignore[no-untyped-call]
    if operator.casts:
        for device, key in modes.AUTOCAST.items():
            impl(name, modes.casts(overload, device, operator.casts), key)  # type: ignore[no-untyped-call]


def operators() -> dict[str, Operator]:
    """All operators by name."""
    package = importlib.import_module("weft.ops")
    for module in pkgutil.iter_modules(package.__path__, "weft.ops."):
        importlib.import_module(module.name)
    return dict(_operators)
