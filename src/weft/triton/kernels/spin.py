"""A kernel that holds every compute unit until the host lets it go, to see what runs meanwhile."""

from __future__ import annotations

import triton.language as tl

from weft.triton.jit import kernel
from weft.triton.language import pause


@kernel(do_not_specialize=["spins"])
def spin(
    go,  # one word of host memory: programs end when it is not 0
    started,  # a word of host memory for each program: 1 once it runs
    spins,  # polls after which a program ends by itself
):
    tl.store(started + tl.program_id(0), 1)
    left = spins
    seen = tl.load(go, volatile=True)
    while (seen == 0) & (left > 0):
        left = pause(left)
        seen = tl.load(go, volatile=True)
