"""Ranks of the tests of models have imported what these tests need, once for all of them."""

from __future__ import annotations

import pytest

IMPORTS = (
    *("weft.nn", "torch.distributed.tensor.parallel", "torch._dynamo"),
    "transformers.models.llama.modeling_llama",
)


@pytest.fixture
def ranks(pools):
    """As everywhere: `ranks(3)` is a pool of three ranks that all tests of models share."""
    return lambda world: pools.get(world, imports=IMPORTS)
