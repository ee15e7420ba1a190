"""A `kernel` is compiled for GPUs and interpreted on the host, from one source.

Triton decides at decoration, by TRITON_INTERPRET, whether a function is compiled or interpreted. A
`JitKernel` is a JITFunction for the compiler that also has an interpreted version:
`kernel[grid](...)` compiles and launches, `kernel.interpreted[grid](...)` runs the same source in
this process, on CPU tensors and on memory that other processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.runtime.jit import JITFunction


class _InPlace(GridExecutor):  # type: ignore[misc]
    """Runs a grid on the memory of its arguments. Triton's own copies every storage back when the
    grid has ended, which would undo what peers and engines have written meanwhile."""

    def _init_args_hst(self, given: Any, named: Any) -> tuple[Any, Any]:
        return given, named

    def _restore_args_dev(self, *arguments: Any) -> None:
        pass


class _Interpreted(InterpretedFunction):  # type: ignore[misc]
    def run(self, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        _InPlace(self.rewrite(), self.arg_names, grid)(*given, **named)


class JitKernel(JITFunction):  # type: ignore[misc] # Triton comes without types
    """A function of the Triton language that can be compiled and interpreted in one process."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self.interpreted = _Interpreted(function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        # The compiler inlines the source of a device function and never calls it. So the caller is
        # interpreted code, which has already replaced the functions of the language.
        return self.interpreted.rewrite()(*arguments, **named)


def kernel(
    function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Any:
    """Decorates a kernel or a device function, as `triton.jit` does.

    do_not_specialize: arguments whose values must not cause another compilation (epochs, bounds).
    """
    if function is None:
        return lambda f: kernel(f, do_not_specialize=do_not_specialize)
    return JitKernel(function, do_not_specialize=list(do_not_specialize))
