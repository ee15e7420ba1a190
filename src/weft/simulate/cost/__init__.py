"""The cost of a task that runs alone on a machine, in parts that the event simulator can share.

Every cost has a fixed part that uses no shared resource, and a body that uses compute units, memory
or links. Contention is not included: it follows from sharing these resources.
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
