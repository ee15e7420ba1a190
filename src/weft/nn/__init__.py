"""weft in models: parallel styles for `parallelize_module`, and a pass for `torch.compile`."""

from weft.nn.compiling import compile, overlap_pass
from weft.nn.experts import ExpertParallel
from weft.nn.fsdp import AllGather, gather_by_weft
from weft.nn.report import Match, NearMiss, Report
from weft.nn.styles import ColwiseParallel, ColwiseTogether, RowwiseParallel, SequenceParallel
from weft.nn.symm_mem import SymmMemCompat, symm_mem_compat

__all__ = [
    "AllGather",
    "ColwiseParallel",
    "ColwiseTogether",
    "ExpertParallel",
    "Match",
    "NearMiss",
    "Report",
    "RowwiseParallel",
    "SequenceParallel",
    "SymmMemCompat",
    "compile",
    "gather_by_weft",
    "overlap_pass",
    "symm_mem_compat",
]
