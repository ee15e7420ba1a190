"""torch operators: what users call, and `torch.ops.weft.*` for graphs. One file each."""
