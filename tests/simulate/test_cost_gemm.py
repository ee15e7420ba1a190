"""The GEMM model: accurate where measured, and sane everywhere else."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from weft.errors import Unsupported
from weft.machine import load, measurements, names
from weft.simulate.cost import GemmCost, gemm
from weft.simulate.cost.gemm import TIE

CPU = Path(__file__).parents[1] / "machine" / "two_threads.toml"
sizes = some.integers(1, 20_000)


def mean_error(rows: list[dict[str, str]], machine_name: str, dtypes: dict[str, str]) -> float:
    machine = load(machine_name)
    errors = [
        abs(
            gemm(
                machine,
                int(row["m"]),
                int(row["n"]),
                int(row["k"]),
                dtypes[row["dtype"]],
                batch=int(row.get("batch", "1")),
            ).seconds
            / (float(row["us"]) * 1e-6)
            - 1.0
        )
        for row in rows
        if row["dtype"] in dtypes
    ]
    return sum(errors) / len(errors)


def tall(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if int(row["m"]) >= 1024]


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4])
def test_accuracy_on_h100_over_all_rows_and_over_random_halves(seed: int | None) -> None:
    rows = measurements("gemm_h100")
    if seed is not None:
        rows = random.Random(seed).sample(rows, len(rows) // 2)
    assert mean_error(tall(rows), "h100", {"bf16": "bfloat16"}) <= 0.10
    assert mean_error(rows, "h100", {"bf16": "bfloat16"}) <= 0.15


def test_accuracy_on_rows_no_machine_was_fitted_to() -> None:
    rows = measurements("gemm_h100_held_out")
    assert mean_error(tall(rows), "h100", {"bf16": "bfloat16"}) <= 0.10
    assert mean_error(rows, "h100", {"bf16": "bfloat16"}) <= 0.15


def test_accuracy_on_b200() -> None:
    rows = measurements("gemm_b200")
    assert mean_error(tall(rows), "b200", {"bf16": "bfloat16"}) <= 0.12
    assert mean_error(rows, "b200", {"bf16": "bfloat16"}) <= 0.15


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4])
def test_accuracy_on_mi300x_over_all_rows_and_over_random_halves(seed: int | None) -> None:
    rows = tall(measurements("gemm_gfx942"))
    if seed is not None:
        rows = random.Random(seed).sample(rows, len(rows) // 2)
    for written, dtype in (
        ("bf16", "bfloat16"),
        ("int8", "int8"),
        ("fp8-blockscale", "float8_blockscale"),
    ):
        assert mean_error(rows, "mi300x", {written: dtype}) <= 0.20


def test_published_best_rates() -> None:
    """The best GEMMs measured on MI300X: 708e12 in bfloat16, 1273e12 in float8."""
    machine = load("mi300x")
    shapes = [(4096 * i, 4096 * j, 4096 * k) for i in range(1, 5) for j in (1, 2) for k in (1, 2)]
    for dtype, best in (("bfloat16", 708e12), ("float8", 1273e12)):
        reached = max(2 * m * n * k / gemm(machine, m, n, k, dtype).seconds for m, n, k in shapes)
        assert reached == pytest.approx(best, rel=0.06)


@settings(max_examples=150, deadline=None)
@given(
    some.sampled_from(["b200", "h100", "mi300x", "mi355x"]),
    sizes,
    sizes,
    sizes,
    some.integers(1, 4),
)
def test_pieces_add_up_and_bounds_hold(name: str, m: int, n: int, k: int, batch: int) -> None:
    machine = load(name)
    cost = gemm(machine, m, n, k, batch=batch)
    assert cost.seconds == cost.launch + max(cost.compute_seconds, cost.memory_seconds)
    assert cost.compute_seconds >= 2.0 * m * n * k * batch / machine.compute.peak["bfloat16"]
    assert cost.bytes >= 2.0 * batch * (m * k + n * k + m * n)
    assert cost.memory_seconds >= cost.bytes / machine.memory.peak_bandwidth
    assert 1 <= cost.busy_units <= machine.compute.units
    assert cost.split_k >= 1
    assert cost.waves >= 1


@settings(max_examples=80, deadline=None)
@given(some.sampled_from(["h100", "mi300x"]), sizes, sizes, sizes, some.floats(0.05, 1.0))
def test_less_bandwidth_is_never_quicker(
    name: str, m: int, n: int, k: int, bandwidth: float
) -> None:
    machine = load(name)
    whole, part = gemm(machine, m, n, k), gemm(machine, m, n, k, bandwidth=bandwidth)
    assert part.seconds >= whole.seconds
    assert part.compute_seconds == whole.compute_seconds
    assert part.memory_seconds == pytest.approx(
        machine.memory.latency + (whole.memory_seconds - machine.memory.latency) / bandwidth
    )


@settings(max_examples=80, deadline=None)
@given(some.sampled_from(["h100", "mi300x"]), sizes, sizes, sizes, some.integers(1, 131))
def test_fewer_units_never_compute_quicker(name: str, m: int, n: int, k: int, gone: int) -> None:
    machine = load(name)
    whole = gemm(machine, m, n, k)
    part = gemm(machine, m, n, k, units=machine.compute.units - gone)
    assert part.compute_seconds >= whole.compute_seconds * (1 - 1e-9)
    assert (part.tile, part.split_k) == (whole.tile, whole.split_k)


def test_cutting_a_gemm_into_pieces_costs() -> None:
    """Decomposition loss: pieces along M or K take longer in sum than the whole, but for what a
    library gives away that takes the larger of two tiles."""
    machine = load("mi300x")
    for m, n, k in [(16384, 2048, 131072), (131072, 2048, 16384), (147456, 3584, 4096)]:
        whole = gemm(machine, m, n, k).seconds
        for pieces in (8, 64):
            rows = pieces * gemm(machine, m // pieces, n, k, part_of=whole).seconds
            depth = pieces * gemm(machine, m, n, k // pieces, part_of=whole).seconds
            assert whole * 0.99 < rows < whole * 2.5
            assert whole * (1.0 - TIE) < depth


def test_a_piece_of_long_work_runs_at_the_settled_clock() -> None:
    machine = load("h100")
    alone = gemm(machine, 2048, 2048, 2048)
    piece = gemm(machine, 2048, 2048, 2048, part_of=1.0)
    assert piece.compute_seconds / alone.compute_seconds == pytest.approx(
        1 / machine.compute.sustained_share, rel=0.03
    )
    assert gemm(machine, 2048, 2048, 2048, part_of=1e-9) == alone


def test_waves_are_quantised() -> None:
    machine = load("h100")
    full = gemm(machine, 128 * 132, 256, 8192)
    over = gemm(machine, 128 * 133, 256, 8192)
    assert over.compute_seconds > full.compute_seconds * 1.05


def test_a_last_round_is_filled_by_splitting_deep_k() -> None:
    """Many tiles too: without it a whole GEMM would run slower than the pieces it is cut into."""
    machine = load("mi300x")
    whole = gemm(machine, 16384, 2048, 131072)
    piece = gemm(machine, 2048, 2048, 131072, part_of=whole.seconds)
    assert whole.waves > 1
    assert whole.split_k > 1
    assert whole.seconds <= 8 * piece.seconds


def test_small_outputs_with_deep_k_are_split() -> None:
    machine = load("h100")
    cost = gemm(machine, 64, 64, 65536)
    assert cost.split_k > 8
    assert cost.launch > gemm(machine, 64, 64, 64).launch


def test_nothing_costs_nothing() -> None:
    for m, n, k, batch in [(0, 5, 5, 1), (5, 0, 5, 1), (5, 5, 0, 1), (5, 5, 5, 0)]:
        assert gemm(load("h100"), m, n, k, batch=batch) == GemmCost(
            0.0, 0.0, 0.0, 0.0, 0.0, (0, 0), 1, 0, 0
        )


def test_every_dtype_of_every_machine() -> None:
    for name in names():
        machine = load(name)
        seconds = {d: gemm(machine, 4096, 4096, 4096, d).seconds for d in machine.compute.rate}
        assert seconds["float64"] >= seconds["float32"] > seconds["bfloat16"] > seconds["float8"]
        rate = machine.compute.rate
        if rate["float16"] == rate["bfloat16"]:  # published rates of an MI325X differ
            assert seconds["float16"] == seconds["bfloat16"]
        else:
            faster = rate["float16"] > rate["bfloat16"]
            assert (seconds["float16"] < seconds["bfloat16"]) == faster


def test_a_host_by_its_measured_rates() -> None:
    machine = load(CPU)
    near = gemm(machine, 64, 1024, 1024, "float32")
    assert 2 * 64 * 1024 * 1024 / near.compute_seconds == pytest.approx(9e10, rel=0.02)
    far = gemm(machine, 8192, 8192, 8192, "float32")
    assert 2 * 8192**3 / far.compute_seconds == pytest.approx(1.5e11, rel=0.02)
    one = gemm(machine, 8192, 8192, 8192, "float32", units=1)
    assert one.compute_seconds == pytest.approx(2 * far.compute_seconds)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"m": -1}, "cannot have the sizes -1 x 8 x 8"),
        ({"dtype": "bfloat61"}, "no GEMM rate for bfloat61.*did you mean bfloat16"),
        ({"units": 0}, "1 to 132 compute units to give, not 0"),
        ({"units": 133}, "1 to 132 compute units to give, not 133"),
        ({"bandwidth": 0.0}, r"must be in \(0, 1\]"),
        ({"part_of": -1.0}, "cannot be part of -1.0 seconds"),
        ({"bandwidth": float("nan")}, r"must be in \(0, 1\]"),
    ],
)
def test_bad_calls(arguments: dict[str, object], says: str) -> None:
    call = {"m": 8, "n": 8, "k": 8, **arguments}
    with pytest.raises(Unsupported, match=says):
        gemm(load("h100"), **call)  # type: ignore[arg-type]


def test_quick_enough_for_thousands() -> None:
    """Tens of microseconds for a new shape, ~1 for a known one; the bounds suit a busy host."""
    machine = load("mi300x")
    shapes = [(1024 + i, 2048, 4096) for i in range(500)]
    start = time.process_time()
    for m, n, k in shapes:
        gemm(machine, m, n, k)
    middle = time.process_time()
    for m, n, k in shapes:
        gemm(machine, m, n, k)
    end = time.process_time()
    assert (middle - start) / len(shapes) < 200e-6
    assert (end - middle) / len(shapes) < 10e-6
