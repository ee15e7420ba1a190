"""Schedules: names, the space, and points that cannot exist."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import Schedule, Unsupported
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import ENGINES, MAIN_NAMES, MAX_DEPTH

POINTS = [
    Schedule(*point)
    for point in itertools.product(
        (None, 0, 1, 2, 3, 16, MAX_DEPTH),
        ("peer", "all"),
        ("rows", "columns"),
        ("uniform", "local"),
        ("fused", "unfused", "adaptive"),
        ENGINES,
    )
]


def test_every_name_parses_back_to_its_schedule():
    for schedule in POINTS:
        if schedule.serial and schedule != Schedule.parse(f"serial@{schedule.engine}"):
            continue  # at depth 0 the other axes mean nothing, and only one of them has a name
        assert Schedule.parse(schedule.name) == schedule
        assert Schedule.parse(str(schedule)).name == schedule.name


def test_names_are_unique():
    named = [s for s in POINTS if not s.serial or s == Schedule.parse(f"serial@{s.engine}")]
    assert len({s.name for s in named}) == len(named)


@pytest.mark.parametrize("base", MAIN_NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_main_names_print_as_written(base, engine):
    schedule = Schedule.parse(f"{base}@{engine}")
    assert schedule.name == f"{base}@{engine}"
    assert schedule.base == base
    assert schedule.engine == engine


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adaptive", Schedule(fusion="adaptive")),
        ("adaptive:16@cores", Schedule(depth=16, fusion="adaptive", engine="cores")),
        ("  serial ", Schedule(depth=0, start="uniform")),
        ("shard-p2p@direct", Schedule(1, "peer", fusion="unfused", engine="direct")),
        ("hetero-unfused-1d:1", Schedule(depth=1, fusion="unfused")),
        ("uniform-fused-2d-p2p:3", Schedule(3, "peer", "columns", "uniform", "fused")),
        ("hetero-fused-1d:0016@dma", Schedule(depth=16)),
    ],
)
def test_examples(name, expected):
    assert Schedule.parse(name) == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adaptve", "did you mean adaptive"),
        ("shard_p2p", "no schedule name"),
        ("shardp2p", "did you mean shard-p2p"),
        ("hetero-fuse-1d", "hetero-fused-1d"),
        ("adaptive@dam", "did you mean dma"),
        ("adaptive@gpu", "the engines are dma, cores, direct"),
        ("adaptive:0", "must be from 1 to"),
        (f"adaptive:{MAX_DEPTH + 1}", "must be from 1 to"),
        ("adaptive:-3", "no schedule name"),
        ("serial:4", "fixed depth"),
        ("shard-p2p:2@dma", "fixed depth"),
        ("", "no schedule name"),
        ("@dma", "no schedule name"),
        ("adaptive@", "no schedule name"),
        ("Adaptive", "no schedule name"),
        ("qqqqqqqq", "the main names are serial"),
        ("adaptive:" + "9" * 5000, "no schedule name"),
        ("adaptive\n", "adaptive"),
    ],
)
def test_a_wrong_name_is_refused_in_one_sentence(name, said):
    if name.strip() == "adaptive":
        assert Schedule.parse(name) == Schedule.parse("adaptive")
        return
    with pytest.raises(Unsupported, match=said) as refused:
        Schedule.parse(name)
    assert "\n" not in str(refused.value)


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused(text):
    try:
        schedule = Schedule.parse(text)
    except Unsupported:
        return
    assert Schedule.parse(schedule.name) == schedule


def test_a_schedule_is_a_value():
    assert Schedule.parse("adaptive@dma") == Schedule(fusion="adaptive")
    assert len({Schedule.parse("adaptive"), Schedule(fusion="adaptive")}) == 1
    with pytest.raises(AttributeError):
        Schedule.parse("adaptive").depth = 3  # type: ignore[misc]


def test_the_space_is_the_possible_main_names():
    space = Schedule.space(SimpleNamespace(world=4))
    assert space[0].serial
    assert len(space) == len(set(space))
    assert all(schedule.impossible() is None for schedule in space)
    assert {s.base for s in space} == set(MAIN_NAMES)
    expected = {
        f"{base}@{engine}"
        for base in MAIN_NAMES
        for engine in ENGINES
        if engine != "direct" or base in ("shard-p2p", "hetero-unfused-1d", "adaptive")
    }
    assert {s.name for s in space} == expected


def test_one_rank_has_one_schedule():
    assert [s.name for s in Schedule.space(SimpleNamespace(world=1))] == ["serial@dma"]


def test_an_engine_that_is_not_there_is_impossible():
    assert "there is no engine 'warp'" in Schedule(engine="warp").impossible()


def test_impossible_points_are_refused_with_the_reason():
    operation = AllGatherMatmul.of(8, 4, 8, 2)
    refused = [s for s in POINTS if s.impossible() is not None]
    assert refused
    for schedule in refused:
        reason = schedule.impossible()
        assert reason
        with pytest.raises(Unsupported) as error:
            operation.lower(schedule)
        assert reason in str(error.value)
        assert schedule.name in str(error.value)


def test_possible_points_are_lowered():
    operation = AllGatherMatmul.of(8, 4, 8, 2)
    for schedule in POINTS:
        if schedule.impossible() is None:
            assert operation.lower(schedule).tasks


@pytest.mark.parametrize("depth", [-1, MAX_DEPTH + 1])
def test_a_depth_out_of_range_is_refused_when_lowered(depth):
    with pytest.raises(Unsupported, match="outside 0 to"):
        AllGatherMatmul.of(8, 4, 8, 2).lower(Schedule(depth=depth))


@pytest.mark.parametrize("wrong", [None, 3, [], b"serial", Schedule()])
def test_only_names_are_parsed(wrong):
    with pytest.raises(Unsupported, match="a schedule is parsed from its name, not from"):
        Schedule.parse(wrong)
