"""Lets the threads of gloo finish before Python ends.

A thread of gloo drops what a collective has held after the caller has gone on, and needs Python's
lock (the GIL) for that. If Python ends first, the process aborts with "terminate called without an
active exception" (pytorch issue 190489). `destroy_process_group` joins these threads, unless
something still holds the group, as DTensor's collectives do in torch 2.13.
"""

from __future__ import annotations

import os
import time

_NAME = "pt_gloo_runloop"
_NAP = 0.005
_LONGEST = 5.0
"""Seconds: between two looks, and until Python ends in any case."""


def settle() -> None:
    """Waits until all threads of gloo sleep. Python's lock is free meanwhile."""
    until = time.monotonic() + _LONGEST
    while _states():
        time.sleep(_NAP)
        if _states() <= {"S"} or time.monotonic() > until:
            return


def _states() -> set[str]:
    """The states that threads of gloo in this process are in, a letter each (S: sleeps)."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == _NAME:
            found.add(rest.split()[0])
    return found
