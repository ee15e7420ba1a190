"""The first call on a device checks a product of known numbers before it gives any other."""

from __future__ import annotations

import pytest


def first_calls(broken: bool) -> tuple[str, float]:
    import os

    import torch
    import torch.distributed as dist

    import weft
    from weft.loom.driver import LoomDriver

    os.environ["WEFT_CHECK"] = "on"
    group, copy = dist.new_group(), LoomDriver.copy
    if broken:
        LoomDriver.copy = lambda self, target, source, stream: None  # never brings anything
    try:
        x, w = torch.ones(4, 3, device="loom"), torch.ones(3, 2, device="loom")
        y = weft.all_gather_matmul(x, w, group=group)
        return "", y.cpu().sum().item()
    except weft.Unsupported as error:
        return str(error), 0.0
    finally:
        LoomDriver.copy = copy
        del os.environ["WEFT_CHECK"]
        torch.accelerator.synchronize()
        dist.destroy_process_group(group)


@pytest.mark.parametrize("broken", [False, True])
def test_a_device_that_computes_wrongly_is_refused(loom, broken):
    """What is not brought is not logged either, so the detector has nothing to say."""
    found = loom(2).run(first_calls, broken)
    for message, total in found:
        assert ("came out wrong on loom" in message) == broken
        assert total == (0.0 if broken else 48.0)
