"""One source, two lives: a `kernel` is compiled for GPUs and interpreted on the host.

Triton decides at decoration, by TRITON_INTERPRET, whether a function can be compiled or be
interpreted, and never both. A `Kernel` is a JITFunction, which the compiler reads, that also knows
its interpreted twin: `kernel[grid](...)` compiles and launches, `kernel.interpreted[grid](...)`
runs the same source here, on CPU tensors and on memory that other processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Kernel(JITFunction):  # type: ignore[misc] # Triton comes without types
    """A function of the Triton language that can be compiled and interpreted in one process."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self.interpreted = InterpretedFunction(function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        # The compiler inlines the source of a device function and never calls it: whoever calls
        # is interpreted code, and has replaced the words of the language already.
        return self.interpreted.rewrite()(*arguments, **named)


def kernel(
    function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Any:
    """Decorates a kernel or a device function, as `triton.jit` does.

    do_not_specialize: arguments whose values must not cause another compilation (epochs, bounds).
    """
    if function is None:
        return lambda f: kernel(f, do_not_specialize=do_not_specialize)
    return Kernel(function, do_not_specialize=list(do_not_specialize))
