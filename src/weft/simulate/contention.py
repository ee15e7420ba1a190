"""Contention: what kernels and bytes that move beside them do to each other, in one place.

Whoever simulates, estimates or chooses takes these numbers, whatever the plan is: dependent or
independent work, moved by copy engines, by cores, or by the kernel that computes.

- Compute units and memory bandwidth are shared out by the event simulator, and are not here.
- Beyond those, kernels and bytes meet in the fabric, in caches and over power. While bytes flow and
  a kernel runs on a device, each is slowed: a kernel takes `1 + share` times as long beside links
  that are full, less in proportion beside links that are not; bytes take `1 + share` times as long
  beside any kernel, each copy and all that pass a port together.
- `links.interference` of a machine is that share for bytes which cross a device's memory once. A
  byte that cores move makes more traffic (`cores.memory_bytes_per_byte`), so it disturbs as much
  more.

`docs/fidelity.md` says what the one number was fitted to, and what the fit costs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.machine import Machine


@dataclass(frozen=True, slots=True)
class Contention:
    """How much kernels and bytes slow each other on a device, for one way to move the bytes."""

    share: float  # what either loses beside the other, at full links
    full: float  # bytes per second that leave a device over full links; as many enter it

    def slows_kernel(self, flowing: float) -> float:
        """How many times as long a kernel takes while so many bytes per second leave the device."""
        return 1.0 + self.share * min(1.0, flowing / self.full)

    def slows_bytes(self, busy: float = 1.0) -> float:
        """How many times as long bytes take while a kernel keeps that share of the units busy."""
        return 1.0 + self.share * busy


def contention(machine: Machine, engine: str, world: int) -> Contention:
    """The contention on a machine whose `world` ranks move bytes by `engine`: dma, cores, or
    direct, where a kernel reads or writes the memory of peers itself."""
    traffic = {
        "dma": machine.engines.memory_bytes_per_byte,
        "cores": machine.cores.memory_bytes_per_byte,
    }
    share = machine.links.interference * traffic.get(engine, 1.0)
    return Contention(share, machine.links.out_of_device(max(2, world)))
