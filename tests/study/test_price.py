"""Prices: their parts add up, they are the simulator's costs, and measurements nearby are found."""

from __future__ import annotations

import pytest

from weft.errors import Unsupported
from weft.machine import load, measurements, names
from weft.simulate.cost import collective, copy, gemm
from weft.study.nearest import nearest_collective, nearest_copy, nearest_gemm, nearest_variant
from weft.study.price import price_collective, price_copy, price_gemm

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


def adds_up(price) -> bool:
    return price.seconds == pytest.approx(sum(seconds for _, seconds in price.parts))


@pytest.mark.parametrize("name", names())
def test_parts_add_up_to_the_costs_of_the_simulator(name: str) -> None:
    machine = load(name)
    for shape in ((8192, 8192, 8192), (7, 65, 40961), (1, 1, 1)):
        price = price_gemm(machine, *shape)
        assert adds_up(price)
        assert price.seconds == gemm(machine, *shape).seconds
    for kind in KINDS:
        for size in (1, 1 << 14, 1 << 26):
            for engine in ("cores", "dma"):
                price = price_collective(machine, kind, size, 8, engine=engine)
                total = 8 * size if kind == "all_gather" else size
                assert adds_up(price)
                assert price.seconds == collective(machine, kind, total, 8, driver=engine)
    for engine in ("cores", "dma"):
        price = price_copy(machine, 1 << 20, engine=engine)
        assert adds_up(price)
        assert price.seconds == copy(machine, 1 << 20, engine=engine).seconds


def test_fewer_units_take_longer_and_say_so() -> None:
    machine = load("mi300x")
    few = price_gemm(machine, 8192, 8192, 8192, units=152)
    assert few.numbers["times_all_units"] > 1.5
    assert few.facts["compute units"] == "152"
    few = price_collective(machine, "all_gather", 1 << 26, units=8)
    assert few.numbers["times_enough_units"] > 3
    enough = price_collective(machine, "all_gather", 1 << 26, units=64)
    assert "times_enough_units" not in enough.numbers


def test_a_measured_gemm_is_found_at_its_own_size() -> None:
    row = measurements("gemm_h100")[100]
    shape = (int(row["m"]), int(row["n"]), int(row["k"]))
    found = nearest_gemm(load("h100"), *shape, "bfloat16")
    assert found is not None
    assert found.far == 0.0
    assert found.measured == float(row["us"])
    assert "at this very size" in found.text()
    other = nearest_gemm(load("h100"), 2 * shape[0], shape[1], shape[2], "bfloat16")
    assert other is not None
    assert other.far <= 1.0


def test_nearest_means_the_same_kind_world_and_dtype() -> None:
    h100 = load("h100")
    for world in (2, 4, 8):
        found = nearest_collective(h100, "all_to_all", 1 << 20, world)
        assert found is not None
        assert f"all_to_all of {1 << 20} bytes in all on {world} devices" in found.what
    assert nearest_gemm(h100, 64, 64, 64, "float64") is None
    assert nearest_gemm(load("mi355x"), 64, 64, 64, "bfloat16") is None
    assert nearest_collective(load("mi300x"), "all_gather", 1 << 20, 8) is None
    found = nearest_collective(load("mi300x"), "all_reduce", 1 << 20, 8)
    assert found is not None
    assert found.source == "rccl_mi300x_all_reduce.csv"


def test_machines_do_not_take_each_other_for_measured() -> None:
    """gemm_h100_held_out.csv is of h100; nothing of b200 is of gb200."""
    sources = {name: nearest_gemm(load(name), 64, 64, 64, "bfloat16") for name in names()}
    for name, found in sources.items():
        if found is not None:
            own = ("gfx942",) if name in ("mi300x", "mi325x") else (name,)
            assert any(found.source.startswith(f"gemm_{one}") for one in own)


def test_engines_were_measured_against_plain_copies() -> None:
    mi300x = load("mi300x")
    found = nearest_variant(mi300x, "all_gather", 65536, "b2b", True)
    assert found is not None
    assert (found.measured, found.far) == (4.46, 0.0)
    assert nearest_variant(mi300x, "all_reduce", 65536, None, False) is None
    share, rate = nearest_copy(mi300x, 65536), nearest_copy(load("mi355x"), 65536)
    assert share is not None
    assert rate is not None
    assert (share.measured, share.unit, rate.measured, rate.unit) == (54.0, "%", 17.0, "GB/s")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: price_gemm(m, 0, 1, 1), "m must be from 1"),
        (lambda m: price_gemm(m, 1, 1, 1, units=400), "1 to 304 compute units"),
        (lambda m: price_gemm(m, 1, 1, 1, "fp8"), "has no GEMM rate for fp8"),
        (lambda m: price_collective(m, "gather", 1), "no collective 'gather'"),
        (lambda m: price_collective(m, "all_gather", 0), "size must be from 1"),
        (lambda m: price_collective(m, "all_gather", 1, 9), "has 8 devices"),
        (lambda m: price_collective(m, "all_gather", 1, engine="gpu"), "cores or dma"),
        (lambda m: price_collective(m, "all_gather", 1, engine="dma", units=4), "leave out"),
        (lambda m: price_collective(m, "all_gather", 1, variant="b2b"), "add --engine dma"),
        (
            lambda m: price_collective(m, "all_gather", 1, engine="dma", variant="swap"),
            "no variant 'swap'",
        ),
        (lambda m: price_copy(m, 1, engine="cores", prelaunched=True), "leave out --prelaunched"),
        (lambda m: price_copy(m, 1, rows=0), "rows must be from 1"),
    ],
)
def test_bad_questions(call, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        call(load("mi300x"))
