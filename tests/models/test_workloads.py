"""Training steps on clusters: the same work plain and fused, sizes that scale, honest refusals."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from weft.errors import Unsupported
from weft.machine import load, load_cluster
from weft.machine.cluster import of_machine
from weft.models.workloads import FOLDER, WORKLOADS, load_workload, models
from weft.study.scaling import Point, scale

CLUSTER = load_cluster("mi300x")


def points(
    name: str, nodes: tuple[int, ...], scaling: str = "weak", **change: object
) -> list[Point]:
    workload = load_workload(name)
    workload = replace(workload, config=replace(workload.config, **change))
    return list(scale(workload, CLUSTER, nodes, (scaling,)).points)


@pytest.mark.parametrize("name", WORKLOADS)
def test_fused_does_the_same_work_and_is_never_slower(name: str) -> None:
    for point in points(name, (1, 4)):
        assert point.fused.seconds <= point.plain.seconds
        flops = [sum(span.num_flops for span in ran.spans) for ran in (point.plain, point.fused)]
        assert flops[1] == pytest.approx(flops[0], rel=1e-3)
        sent = [sum(span.num_bytes for span in ran.spans) for ran in (point.plain, point.fused)]
        assert sent[1] == pytest.approx(sent[0], rel=0.35)  # other algorithms may take other ways
        for ran in (point.plain, point.fused):
            lane = sorted((s.start, s.end) for s in ran.spans if s.lane == "compute")
            assert all(one[1] <= two[0] + 1e-9 for one, two in pairwise(lane))
        assert 0.0 <= point.exposed(False) + 1e-9 <= point.plain.seconds


def test_dlrm_moves_the_bytes_it_says() -> None:
    (point,) = points("dlrm", (4,))
    config, world = load_workload("dlrm").config, 32
    sent = 512 * config.tables * config.dimension * config.sent_bytes  # of a device
    for ran in (point.plain, point.fused):
        moved = sum(s.num_bytes for s in ran.spans if s.task.startswith("all-to-all forward"))
        assert moved == pytest.approx(sent * (world - 1) / world, rel=1e-3)
    parts = point.parts(False)
    rows = 512 * config.tables * config.pooling * (config.dimension * config.table_bytes + 8)
    expected = (rows + sent) / config.lookup_share / CLUSTER.device.memory.bandwidth
    assert parts["lookup"] == pytest.approx(expected, rel=0.01)
    wire = sent * 3 / 4 / 4.85e10
    assert parts["all-to-all forward"] == pytest.approx(wire, rel=0.03)


def test_dlrm_saves_what_the_paper_says_in_the_region() -> None:
    (point,) = points("dlrm", (128,))
    assert 0.14 <= point.saving <= 0.28
    assert point.exposed(True) < point.exposed(False)


def test_what_decides_the_saving() -> None:
    """Without lookups there is nothing to hide the all-to-all behind, and without an all-to-all
    nothing to hide."""
    (usual,) = points("dlrm", (16,))
    (light,) = points("dlrm", (16,), pooling=0.5)
    (small,) = points("dlrm", (16,), sent_bytes=0.02)
    assert light.saving < 0.5 * usual.saving
    assert small.saving < 0.5 * usual.saving
    (exact,) = points("dlrm", (128,), gradient_bytes=4.0)
    assert exact.plain.seconds > points("dlrm", (128,))[0].plain.seconds


def test_strong_and_weak_meet_where_their_sizes_do() -> None:
    strong, weak = points("dlrm", (128,), "strong"), points("dlrm", (128,), "weak")
    assert strong[0].size == weak[0].size == 512
    assert strong[0].plain.seconds == weak[0].plain.seconds
    shrinking = points("moe", (1, 4, 16), "strong")
    assert shrinking[0].plain.seconds > shrinking[1].plain.seconds > shrinking[2].plain.seconds


def test_llama_between_nodes() -> None:
    one, four = points("llama", (1, 4), layers=2)
    names = {span.task for span in four.plain.spans}
    assert any("gradients" in name for name in names)
    assert not any("gradients" in span.task for span in one.plain.spans)
    (sequence,) = points("llama", (4,), layers=2, between="sequence")
    assert any("keys" in span.task for span in sequence.plain.spans)
    assert sequence.plain.seconds > four.plain.seconds  # four times the context


def test_moe_groups_of_experts_are_alike() -> None:
    """256 experts fill 32 nodes; 64 nodes hold two groups that do not meet."""
    found = points("moe", (32, 64), layers=1)
    assert found[0].plain.seconds == pytest.approx(found[1].plain.seconds)
    assert found[1].world == 512


def test_128_nodes_in_seconds() -> None:
    start = time.process_time()
    points("dlrm", (128,), "strong")
    assert time.process_time() - start < 10


def test_sizes_come_from_files(tmp_path: Path) -> None:
    assert models("dlrm") == ["dlrm", "dlrm-mlperf"]
    text = (FOLDER / "dlrm.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("tables = 1024", "tables = 64"))
    assert load_workload("dlrm", str(tmp_path / "mine.toml")).config.tables == 64
    (tmp_path / "bad.toml").write_text(text.replace("tables = 1024", "tables = -1"))
    with pytest.raises(Unsupported, match=r"bad\.toml: tables must not be negative"):
        load_workload("dlrm", str(tmp_path / "bad.toml"))
    (tmp_path / "bad.toml").write_text(text.replace("slices = [1, 2, 4, 8, 16, 32]", "slices = []"))
    with pytest.raises(Unsupported, match="slices needs at least one"):
        load_workload("dlrm", str(tmp_path / "bad.toml"))
    with pytest.raises(Unsupported, match="did you mean dlrm-mlperf"):
        load_workload("dlrm", "dlrm-mlpref")
    with pytest.raises(Unsupported, match="no workload 'dlmr'"):
        load_workload("dlmr")


def test_what_does_not_go_round_is_refused() -> None:
    with pytest.raises(Unsupported, match="100 samples do not go round 128 devices"):
        points("dlrm", (16,), "strong", batch=100)
    with pytest.raises(Unsupported, match="a cluster has 1 to"):
        points("dlrm", (0,))
    with pytest.raises(Unsupported, match="b200: 2 nodes need a"):
        scale(load_workload("dlrm"), of_machine(load("b200")), (2,))
    with pytest.raises(Unsupported, match="has no GEMM rate for fp4"):
        points("dlrm", (1,), dtype="fp4")
