"""Exploring: four times per shape, every schedule, plain data; and FiCCO's story without tuning."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from weft.errors import Unsupported
from weft.machine import load
from weft.schedule import Schedule
from weft.study.exploration import Exploration, explore
from weft.study.scenarios import Shape, ficco, from_csv

AG = "all_gather_matmul"
SHAPES = (Shape(16384, 8192, 4096, "a"), Shape(1000, 777, 512, "odd"), Shape(64, 64, 64, "tiny"))


@cache
def whole_table() -> Exploration:
    return explore(load("mi300x"), AG, ficco(), 8)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("machine", ["mi300x", "h100"])
def test_times_are_consistent(machine: str, world: int) -> None:
    for scenario in explore(load(machine), AG, SHAPES, world).scenarios:
        parts = scenario.compute + scenario.communication
        # A signal, and a kernel's start, lie between the two.
        assert parts <= scenario.serial + 1e-9
        assert scenario.serial <= parts + 1e-5
        assert scenario.ideal == max(scenario.compute, scenario.communication)
        assert scenario.outcome(scenario.baseline).speedup == 1.0
        for outcome in scenario.outcomes:
            assert outcome.seconds >= scenario.compute * 0.999
            assert outcome.losses.total == pytest.approx(
                outcome.seconds - scenario.ideal, rel=1e-6, abs=1e-9
            )
            if outcome.schedule.engine != "direct":  # which moves nothing, so pays for no copy
                assert outcome.percent_of_ideal <= 100.0 + 1e-6


def test_json_has_the_promised_form() -> None:
    found = explore(load("mi300x"), AG, SHAPES[:1], 4, [Schedule.parse("adaptive")]).to_json()
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["scenarios"]
    (scenario,) = found["scenarios"]
    assert list(scenario) == [
        "id",
        "compute_ms",
        "communication_ms",
        "serial_ms",
        "ideal_ms",
        "schedules",
        "auto",
    ]
    (schedule,) = scenario["schedules"]
    assert list(schedule) == ["name", "ms", "speedup", "percent_of_ideal", "losses"]
    assert schedule["name"] == "adaptive@dma"
    assert schedule["speedup"] == pytest.approx(scenario["serial_ms"] / schedule["ms"])
    lost = sum(schedule["losses"].values())
    assert lost == pytest.approx(schedule["ms"] - scenario["ideal_ms"])


def test_timelines_are_there_on_request() -> None:
    found = explore(load("h100"), AG, SHAPES[:1], 4)
    for outcome in found.scenarios[0].outcomes:
        timeline = found.timeline("a", outcome.schedule)
        assert timeline.seconds == pytest.approx(outcome.seconds)
        assert timeline.ranks == [0, 1, 2, 3]
    assert found.timeline("a", "adaptive@dma") == found.timeline("a", Schedule.parse("adaptive"))
    with pytest.raises(Unsupported, match="no scenario 'b'"):
        found.timeline("b", "serial")


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    explore(load("h100"), AG, SHAPES, 2, progress=lambda *step: told.append(step))
    assert told == [(0, 3, "a"), (1, 3, "odd"), (2, 3, "tiny"), (3, 3, "")]


def test_a_schedule_that_does_not_fit_is_left_out_with_the_reason() -> None:
    node = load("mi300x")
    shape = Shape(65536, 65536, 512, "sums")
    needed = 65536 * 512 * 2 * 2 + 512 * 8192 * 2 + 65536 * 8192 * 2
    small = replace(node, memory=replace(node.memory, capacity=1.2 * needed))
    (scenario,) = explore(small, AG, [shape], 8).scenarios
    refused = {schedule.name: reason for schedule, reason in scenario.refused}
    assert "uniform-fused-2d@dma" in refused  # sums in float32 beside the outputs
    assert "adaptive@dma" not in refused
    with pytest.raises(Unsupported, match=r"refused: .* needs 3.3 GB on each rank"):
        scenario.outcome("uniform-fused-2d")


@pytest.mark.parametrize(
    ("shape", "world", "machine", "words"),
    [
        (Shape(4_000_000, 65536, 16384, "big"), 8, "h100", "big: .* needs .* GB on each rank"),
        (Shape(64, 64, 64, "a"), 16, "h100", "16 ranks need 16 devices; h100 has 8"),
        (Shape(64, 64, 64, "a"), 0, "h100", "at least 1 rank"),
        (Shape(64, 64, 64, "a", dtype="int8"), 2, "nothing", "no machine named"),
    ],
)
def test_what_cannot_be_explored_is_said(
    shape: Shape, world: int, machine: str, words: str
) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        explore(load(machine), AG, [shape], world)
    assert "\n" not in str(caught.value)


def test_unknown_operation_and_no_shapes() -> None:
    with pytest.raises(Unsupported, match="did you mean all_gather_matmul"):
        explore(load("h100"), "all_gather_mm", SHAPES, 2)
    with pytest.raises(Unsupported, match="no shapes"):
        explore(load("h100"), AG, [], 2)


def test_ficco_ships() -> None:
    shapes = ficco()
    assert [shape.id for shape in shapes] == [f"g{i}" for i in range(1, 17)]
    assert all(shape.n % 8 == 0 and shape.note for shape in shapes)
    assert (shapes[4].m, shapes[4].n, shapes[4].k) == (8192, 8192, 262144)


def test_a_file_of_shapes(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("# mine\nm, n, k, id, dtype\n\n64,32,16,first,float16\n8,4,2,,\n")
    assert from_csv(path) == (
        Shape(64, 32, 16, "first", "float16"),
        Shape(8, 4, 2),
    )
    assert from_csv(path)[1].label == "8x4x2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "mine.csv is empty"),
        ("m,n,k\n", "no shapes below its header"),
        ("m,n\n1,2\n", "line 1: there is no column k"),
        ("m,n,k,m\n1,2,3,4\n", "line 1: a column is there twice"),
        ("m,n,k,dtyp\n", "line 1: unknown column 'dtyp' (did you mean dtype?)"),
        ("m,n,k\n1,2,3\n1,2\n", "line 3: there are 2 values for 3 columns"),
        ("m,n,k\n\n# so\n1,two,3\n", "line 4: n must be a whole number, not 'two'"),
        ("m,n,k\n1,2.5,3\n", "line 2: n must be a whole number, not '2.5'"),
        ("m,n,k\n1,0,3\n", "line 2: n must be at least 1, not 0"),
        ("m,n,k\n-1,2,3\n", "line 2: m must be at least 1, not -1"),
        ("m,n,k,dtype\n1,2,3,bf16\n", "line 2: there is no dtype 'bf16'"),
        ("m,n,k\n1,2,3\n1,2,3\n", "line 3: 1x2x3 is on line 2 already"),
        ("m,n,k\n1,2," + "9" * 5000 + "\n", "line 2: k must be a whole number"),
        ("m,n,k\n1,2," + "9" * 200_000 + "\n", "line 2 is no line of a CSV file: field larger"),
        ("m" * 200_000 + "\n", "line 1 is no line of a CSV file: field larger"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(Unsupported) as caught:
        from_csv(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="cannot be read: No such file"):
        from_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"m,n,k\n\xff\xfe\n")
    with pytest.raises(Unsupported, match="not a text file"):
        from_csv(tmp_path / "bytes.csv")


def test_ficco_speedups() -> None:
    scenarios = whole_table().scenarios
    assert 1.6 <= max(s.serial / s.ideal for s in scenarios) <= 2.0
    assert max(s.best.speedup for s in scenarios) >= 1.45
    assert all(s.best.speedup > 1.0 for s in scenarios)


def test_ficco_no_fixed_schedule_is_best_everywhere() -> None:
    winners = set()
    for scenario in whole_table().scenarios:
        fixed = [o for o in scenario.outcomes if o.schedule.fusion != "adaptive"]
        winners.add(min(fixed, key=lambda outcome: outcome.seconds).schedule.name)
    assert len(winners) > 1


def test_ficco_one_peer_at_a_time_fails_on_a_mesh_and_not_on_a_switch() -> None:
    for scenario in whole_table().scenarios:
        if scenario.communication > 0.7 * scenario.compute:
            assert scenario.outcome("shard-p2p@dma").speedup < 0.5
    worst = min(s.outcome("shard-p2p@dma").speedup for s in whole_table().scenarios)
    assert 3.0 < 1.0 / worst < 5.0
    shards = [Schedule.parse("shard-p2p@dma")]
    for scenario in explore(load("h100"), AG, ficco(), 8, shards).scenarios:
        assert scenario.outcome("shard-p2p@dma").speedup > 1.0


def test_ficco_engines_are_ahead_of_cores() -> None:
    for scenario in whole_table().scenarios:
        by = {
            engine: max(o.speedup for o in scenario.outcomes if o.schedule.engine == engine)
            for engine in ("dma", "cores")
        }
        assert by["dma"] > by["cores"]


def test_more_ranks_than_a_plan_can_have_are_refused_at_once() -> None:
    h100 = load("h100")
    large = replace(h100, links=replace(h100.links, world=100_000))
    with pytest.raises(Unsupported, match="at most 256 ranks can be explored, not 100000"):
        explore(large, "all_gather_matmul", [Shape(64, 64, 64, "a")], 100_000)
