"""What a task costs on a machine when it runs alone, in pieces an event simulator can share out.

Every cost has a fixed part that nothing else can use, and a body that needs compute units, memory
traffic or link time. Contention is not modelled here: it follows from sharing those.
"""

from weft.simulate.cost.collective_cost import collective, dma_variants
from weft.simulate.cost.copy import CopyCost, copy
from weft.simulate.cost.gemm import GemmCost, gemm
from weft.simulate.cost.memory import MemoryCost, bandwidth_of, memory_bound

__all__ = [
    "CopyCost",
    "GemmCost",
    "MemoryCost",
    "bandwidth_of",
    "collective",
    "copy",
    "dma_variants",
    "gemm",
    "memory_bound",
]
