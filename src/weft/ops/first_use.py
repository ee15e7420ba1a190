"""The check of a device before its first call: a product whose result is known to the last bit."""

from __future__ import annotations

import os

import torch

from weft.fabric.device import known_product
from weft.run.call import meet
from weft.run.session import Session


class _FirstUse:
    """Whether the device of a session has been checked, or is being checked."""

    begun = False


def check_first_use(session: Session) -> None:
    """Checks the device of a session once; raises `Unsupported` on all ranks if it computes or
    exchanges wrongly. loom, which only emulates, is checked if WEFT_CHECK=on."""
    state = session.part(_FirstUse, lambda _: _FirstUse())
    if state.begun:
        return
    state.begun = True  # the product below is a call of this session
    fabric = session.fabric
    if fabric.can.name == "loom" and os.environ.get(known_product.OFF) != "on":
        return
    from weft.ops.all_gather_matmul import all_gather_matmul

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = all_gather_matmul(x, w, group=fabric.group, schedule="serial@dma")
        return y

    def everyone(right: bool) -> bool:
        own = meet(fabric, "the check of a device", (("right", right),))
        return all(dict(items)["right"] for items in own)

    try:
        known_product.check(product, fabric.device, fabric.rank, fabric.world, everyone)
    except BaseException:
        state.begun = False
        raise
