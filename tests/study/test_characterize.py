"""Losses of cutting and of company: simulated by plans that are right, measured by real ranks."""

from __future__ import annotations

import json

import pytest

from weft.machine import load
from weft.plan.tasks import Matmul
from weft.simulate import run
from weft.study.characterization import (
    CUTS,
    DRIVERS,
    Characterization,
    characterize,
    cut_plan,
    pieces_of,
    shapes_of,
)
from weft.study.characterize_host import characterize_host
from weft.study.scenarios import Shape

LARGE, SMALL = Shape(32768, 8192, 8192), Shape(512, 1024, 1024)


@pytest.fixture(scope="module")
def mi300x() -> Characterization:
    return characterize(load("mi300x"), [LARGE, SMALL, Shape(64, 8192, 65536)])


def test_pieces_cover_a_size_once() -> None:
    assert list(pieces_of(10, 4)) == [(0, 3), (3, 3), (6, 2), (8, 2)]
    assert list(pieces_of(2, 8)) == [(0, 1), (1, 1)]


@pytest.mark.parametrize(("axis", "pieces"), CUTS)
def test_a_cut_computes_the_same(axis: str, pieces: int) -> None:
    plan = cut_plan(Shape(640, 96, 130), axis, pieces)
    matmuls = [task for task in plan.tasks if isinstance(task, Matmul)]
    assert len(matmuls) == pieces
    assert sum(2 * t.a.rows * t.a.columns * t.b.columns for t in matmuls) == 2 * 640 * 96 * 130
    if axis == "k":
        assert [t.accumulate for t in matmuls] == [False] + [True] * (pieces - 1)
        assert plan.buffer[(0, "sums")].dtype == "float32"


def test_loss_is_the_simulated_time_over_that_of_the_whole(mi300x: Characterization) -> None:
    machine = load("mi300x")
    whole = run(cut_plan(LARGE, "m", 1), machine).seconds
    pieces = run(cut_plan(LARGE, "k", 8), machine).seconds
    assert mi300x.characters[0].seconds == whole
    assert mi300x.characters[0].decomposition["k", 8] == pytest.approx(pieces / whole - 1)


def test_small_gemms_bear_less_cutting_and_engines_less_company(mi300x: Characterization) -> None:
    large, small, thin = mi300x.characters
    for cut in CUTS:
        assert 0 < large.decomposition[cut] < small.decomposition[cut]
    for axis in ("m", "k"):
        assert large.decomposition[axis, 8] < large.decomposition[axis, 64]
    # A compute-bound GEMM leaves memory to engines, but not units to cores, which disturb more.
    node = load("mi300x")
    share, traffic = node.links.interference, node.cores.memory_bytes_per_byte
    assert large.contention["dma"] == pytest.approx(share, abs=0.01)
    assert 0.1 < (1 + large.contention["cores"]) / (1 + share * traffic) - 1 < 0.2
    # A memory-bound one shares its bandwidth with either, too.
    assert 0.05 + share < thin.contention["dma"] <= thin.contention["cores"]


def test_a_switch_machine_and_one_without_bfloat16() -> None:
    found = characterize(load("h100"), shapes_of(((4096,), (1024,), (8192,)), "float16"))
    assert found.characters[0].contention["cores"] > 0.2


def test_ratios_and_json(mi300x: Characterization) -> None:
    small = mi300x.characters[1]
    assert small.num_bytes == 2 * (512 * 1024 + 1024 * 1024 + 512 * 1024)
    assert small.op_to_byte == pytest.approx(256)
    found = mi300x.to_json()
    assert json.loads(json.dumps(found)) == found
    assert found["measured"] is False
    first = found["shapes"][0]
    assert list(first["decomposition"]) == ["m8", "m64", "k8", "k64"]
    assert list(first["contention"]) == list(DRIVERS)


def test_this_host_is_measured() -> None:
    found = characterize_host([Shape(512, 128, 256, dtype="float32")], repeat=3)
    (character,) = found.characters
    assert found.measured
    assert 0 < character.seconds < 1
    assert set(character.decomposition) == set(CUTS)
    assert character.decomposition["m", 64] > 0  # slabs of 8 rows cannot be as fast as one of 512
    assert set(character.contention) == set(DRIVERS)
