"""Soak: random calls for a given time, while ranks are stopped, killed and short of memory.

Every result is compared exactly with plain torch, every error with what was done to the ranks, and
memory, threads and file descriptors must not grow. `weft soak` is the command.
"""
