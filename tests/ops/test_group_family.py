"""The five operators on the group fabric: the same plans over point-to-point transfers."""

from __future__ import annotations

import pytest
from family import DTYPES, NAMES, forward, gradients, space

FEW = ("serial@dma", "hetero-unfused-1d@cores", "adaptive:4@dma", "auto")


def _space(world):
    return [name for name in space(world) if not name.endswith("direct")]


@pytest.fixture(scope="module")
def flat(pools):
    """`flat(3)`: three ranks that reach each other by messages alone."""
    made = {}

    def get(world):
        if world not in made:
            made[world] = pools.fresh(world, {"WEFT_FABRIC": "flat"})
        return made[world]

    yield get
    pools.close_fresh()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_schedule_equals_plain_torch(flat, name, world):
    flat(world).run(forward, name, _space(world), range(2))


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(flat, name):
    flat(3).run(forward, name, FEW, (7, 8), DTYPES)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(flat, name):
    flat(2).run(gradients, name, "auto", 3)


# -- two machines of two ranks ---------------------------------------------------------------------


def _named(rank_hosts, function, *arguments):
    """Calls a function on ranks that take themselves for being on these hosts."""
    import os

    import torch.distributed as dist

    os.environ["WEFT_HOST"] = rank_hosts[dist.get_rank()]
    return function(*arguments)


@pytest.fixture(scope="module")
def nested(pools):
    """`nested("aabb")`: one rank per letter, on the host of that name."""
    made = {}

    def get(hosts):
        if hosts not in made:
            made[hosts] = pools.fresh(len(hosts), {})
        pool = made[hosts]
        return lambda function, *arguments: pool.run(_named, hosts, function, *arguments)

    yield get
    pools.close_fresh()


@pytest.mark.parametrize("name", NAMES)
def test_two_levels_equal_plain_torch(nested, name):
    nested("aabb")(forward, name, _space(4), range(2))


@pytest.mark.parametrize("hosts", ["aab", "aaba", "ababc"])
@pytest.mark.parametrize("name", NAMES)
def test_two_levels_of_odd_shapes(nested, name, hosts):
    nested(hosts)(forward, name, FEW, (3,), DTYPES)
