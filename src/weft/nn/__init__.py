"""weft inside models: parallel styles for `parallelize_module`."""

from weft.nn.styles import ColwiseParallel, ColwiseTogether, RowwiseParallel, SequenceParallel

__all__ = ["ColwiseParallel", "ColwiseTogether", "RowwiseParallel", "SequenceParallel"]
