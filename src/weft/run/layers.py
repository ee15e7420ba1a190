"""The layer of a model in which a call is made, for recordings.

Hooks of all modules keep the path of the module that runs, as in `layers.0.mlp`, counted from the
outermost module that was called. A call in a backward pass belongs to the layer whose forward pass
made its node: autograd numbers its nodes in the order in which they are made.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_number = torch._C._autograd._get_sequence_nr
_node = torch._C._current_autograd_node


class Layers:
    """Follows the modules of this process from `start` to `stop`."""

    def __init__(self) -> None:
        self._path: list[str] = []
        self._names: dict[int, dict[int, str]] = {}
        """By root module, the names of its modules."""
        self._roots: list[int] = []
        self._numbers: list[int] = []
        self._layers: list[str] = []
        """The layer whose nodes have numbers from `_numbers[i]` on."""
        self._hooks: list[Any] = []

    def start(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._path, self._roots, self._names = [], [], [], {}

    def now(self) -> tuple[str, bool]:
        """The layer that runs now ("" outside of any), and whether this is its backward pass."""
        node = _node()
        if node is None:
            return (self._path[-1] if self._path else ""), False
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._layers[place] if place >= 0 else ""), True

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._roots:
            self._roots.append(id(module))
            if id(module) not in self._names:
                # A compiled module holds the original one under a name of its own.
                names = {
                    id(m): name.removeprefix("_orig_mod").removeprefix(".")
                    for name, m in module.named_modules()
                }
                names[id(module)] = type(module).__name__
                self._names[id(module)] = names
        above = self._path[-1] if self._path else ""
        self._path.append(self._names[self._roots[0]].get(id(module), above))
        self._mark()

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._path:
            return
        self._path.pop()
        if not self._path:
            self._roots.clear()
        self._mark()

    def _mark(self) -> None:
        """From the next node on, the layer is the one that runs now."""
        if not torch.is_grad_enabled():
            return
        number, layer = _number(), self._path[-1] if self._path else ""
        if self._numbers and self._numbers[-1] == number:  # no node was made since the last mark
            self._layers[-1] = layer
            return
        self._numbers.append(number)
        self._layers.append(layer)
