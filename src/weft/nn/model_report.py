"""The report of `weft.nn.parallelize`: what became of every layer of a model."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from weft.operation import ranks_label

WIDTH = 80
_NAME = 36
_OPERATOR = 22


@dataclass(frozen=True)
class LayerReport:
    """Equal layers of a model.

    name: with `*` for numbers; joined layers are in braces. count: how many there are. style: from
    the plan; empty if the plan does not name them. forward, backward: the weft operator, or what
    runs instead. why: the reason if communication is not overlapped.
    """

    name: str
    count: int
    style: str
    forward: str
    backward: str
    why: str = ""

    @property
    def overlapped(self) -> bool:
        """Whether all communication of the layers is overlapped with a product."""
        return not self.why


@dataclass(frozen=True)
class ModelReport:
    """What `weft.nn.parallelize` did with a model."""

    model: str
    world: int
    layers: tuple[LayerReport, ...]
    sequence_parallel: bool = False

    @property
    def overlapped(self) -> tuple[LayerReport, ...]:
        """The layers whose communication is overlapped with a product."""
        return tuple(layer for layer in self.layers if layer.style and layer.overlapped)

    @property
    def not_overlapped(self) -> tuple[LayerReport, ...]:
        """The layers that communicate without a product to hide it, each with the reason."""
        return tuple(layer for layer in self.layers if layer.style and not layer.overlapped)

    @property
    def replicated(self) -> tuple[LayerReport, ...]:
        """The layers that the plan does not name; every rank holds and computes all of them."""
        return tuple(layer for layer in self.layers if not layer.style)

    def __str__(self) -> str:
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        lines = [f"{self.model} over {ranks_label(self.world)}{sequence}", ""]
        lines.append(f"{'layer':{_NAME}}{'forward':{_OPERATOR}}backward")
        for layer in self.layers:
            if layer.style:
                lines += _row(layer)
        for title, some in (("not overlapped", self.not_overlapped), ("whole", self.replicated)):
            if some:
                lines += ["", f"{title}:"]
                lines += [line for layer in some for line in _reason(layer)]
        done = sum(layer.count for layer in self.overlapped)
        left = sum(layer.count for layer in self.not_overlapped)
        lines += ["", f"{done} sharded layers are overlapped, {left} are not."]
        return "\n".join(lines)


def _row(layer: LayerReport) -> list[str]:
    name = f"{layer.name} x{layer.count}" if layer.count > 1 else layer.name
    *before, last = _lines(name)
    return [*before, f"{last:{_NAME}}{layer.forward:{_OPERATOR}}{layer.backward}".rstrip()]


def _lines(name: str) -> list[str]:
    """A name in lines that fit into their column, broken behind dots."""
    lines = [""]
    for piece in re.split(r"(?<=\.)", name):
        if len(lines[-1]) + len(piece) >= _NAME and lines[-1]:
            lines.append("  ")
        lines[-1] += piece
    return lines


def _reason(layer: LayerReport) -> list[str]:
    return textwrap.wrap(
        f"{layer.name}: {layer.why}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=True,
    )
