"""The link that a measurement asks for: a fixed one, or one that is as slow as compute here."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import Unsupported
from weft.fabric import Link
from weft.fabric.link import Topology
from weft.operation import Operation


@dataclass(frozen=True)
class LinkSpec:
    """A requested link: a fixed one, or one on which communication takes `multiple` times as long
    as compute on this machine."""

    link: Link | None = None
    multiple: float | None = None
    topology: Topology = "mesh"

    @classmethod
    def parse(cls, text: str, topology: Topology = "mesh") -> LinkSpec:
        """`memory`, a rate (`0.1GB/s`), or `balanced`, `0.5x`, `2x`: that multiple of compute."""
        if text == "balanced":
            return cls(multiple=1.0, topology=topology)
        if text.endswith("x"):
            try:
                multiple = float(text[:-1])
            except ValueError:
                multiple = 0.0
            if not 0 < multiple < 1e6:
                raise Unsupported(f"{text!r} is not a link; write e.g. 0.5x, balanced or 2x")
            return cls(multiple=multiple, topology=topology)
        return cls(link=Link.parse(text, topology), topology=topology)


def paced(operation: Operation, spec: LinkSpec, compute: float) -> Link:
    """The link on which communication takes the requested multiple of compute."""
    assert spec.multiple is not None
    load = busiest_link(operation, spec.topology)
    if load == 0:
        return Link(topology=spec.topology)
    return Link(load / (spec.multiple * compute), topology=spec.topology)


def busiest_link(operation: Operation, topology: Topology) -> int:
    """The bytes on the busiest link."""
    world = operation.world
    load: dict[tuple[str, int, int], int] = {}

    def add(link: tuple[str, int, int], num_bytes: int) -> None:
        load[link] = load.get(link, 0) + num_bytes

    for source in range(world):
        for target in range(world):
            num_bytes = operation.num_bytes(source, target)
            if topology == "mesh":
                add(("pair", source, target), num_bytes)
            elif topology == "switch":
                add(("out", source, 0), num_bytes)
                add(("in", target, 0), num_bytes)
            else:
                ahead = (target - source) % world
                step = 1 if ahead <= world - ahead else -1
                at = source
                while at != target:
                    add(("hop", at, step), num_bytes)
                    at = (at + step) % world
    return max(load.values(), default=0)
