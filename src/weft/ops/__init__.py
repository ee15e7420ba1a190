"""The operators: functions for users, and `torch.ops.weft.*` for graphs. One file each."""
