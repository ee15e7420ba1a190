"""weft in models: `parallelize` for whole models, parallel styles for `parallelize_module`, and a
pass for `torch.compile`."""

from weft.nn.compiling import compile, overlap_pass
from weft.nn.expert_parallel import ExpertParallel
from weft.nn.fsdp import AllGather, ReduceScatter, gather_by_weft
from weft.nn.model_report import LayerReport, ModelReport
from weft.nn.parallelize import parallelize
from weft.nn.report import Match, NearMiss, Report
from weft.nn.styles import ColwiseParallel, ColwiseTogether, RowwiseParallel, SequenceParallel
from weft.nn.symm_mem import SymmMemCompat, symm_mem_compat
from weft.ops.embedding_optimizer import RowWiseAdagradInBackward, SGDInBackward

__all__ = [
    "AllGather",
    "ColwiseParallel",
    "ColwiseTogether",
    "ExpertParallel",
    "LayerReport",
    "Match",
    "ModelReport",
    "NearMiss",
    "ReduceScatter",
    "Report",
    "RowWiseAdagradInBackward",
    "RowwiseParallel",
    "SGDInBackward",
    "SequenceParallel",
    "SymmMemCompat",
    "compile",
    "gather_by_weft",
    "overlap_pass",
    "parallelize",
    "symm_mem_compat",
]
