"""Contention: how much kernels and the transfers beside them slow each other.

The simulator, the estimates and the choice of a schedule all use these numbers, for dependent and
independent work, whether copy engines, cores or the computing kernel move the bytes.

- The event simulator distributes compute units and memory bandwidth; they are not included here.
- Kernels and transfers also compete in the fabric, in caches and for power. While bytes flow and a
  kernel runs on a device, both are slower. A kernel takes `1 + share` times as long beside full
  links, and proportionally less beside links that are not full. Transfers take `1 + share` times as
  long beside any kernel; this holds for each copy, and for all bytes through a port together.
- `links.interference` of a machine is that share for bytes that cross a device's memory once. A
  byte that cores move causes more traffic (`cores.memory_bytes_per_byte`), and so more contention.

`docs/fidelity.md` explains to which measurements this number was fitted, and how well it fits
others.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.machine import Machine


@dataclass(frozen=True, slots=True)
class Contention:
    """How much kernels and transfers slow each other on a device, for one way to move bytes."""

    share: float  # how much slower each is beside the other, at full links
    full: float  # bytes per second that leave a device over full links; the same number enters it

    def slows_kernel(self, flowing: float) -> float:
        """The factor on the time of a kernel while this many bytes per second leave the device."""
        return 1.0 + self.share * min(1.0, flowing / self.full)

    def slows_bytes(self, busy: float = 1.0) -> float:
        """The factor on the time of a transfer while a kernel uses that share of the units."""
        return 1.0 + self.share * busy


def contention(machine: Machine, engine: str, world: int) -> Contention:
    """The contention on a machine whose `world` ranks move bytes by `engine`: dma, cores, or
    direct, for which a kernel itself reads or writes the memory of peers."""
    traffic = {
        "dma": machine.engines.memory_bytes_per_byte,
        "cores": machine.cores.memory_bytes_per_byte,
    }
    share = machine.links.interference * traffic.get(engine, 1.0)
    return Contention(share, machine.links.out_of_device(max(2, world)))
