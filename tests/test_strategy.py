"""Strategies are values: they print as names and parse back, and impossible ones are refused."""

from __future__ import annotations

import pytest

from weft.errors import Unsupported
from weft.strategy import NAMES, Strategy

EVERY = [
    "serial",
    "concurrent",
    "prioritized",
    "partitioned:8",
    "prioritized+partitioned:32",
    "dma",
    "dma+trimmed:1",
]


@pytest.mark.parametrize("name", EVERY)
def test_a_name_parses_back(name: str) -> None:
    strategy = Strategy.parse(name)
    assert str(strategy) == strategy.name == name
    assert Strategy.parse(strategy.name) == strategy
    assert strategy.base in NAMES
    assert strategy == Strategy.of(strategy.base, strategy.units or None)


def test_every_name_is_another_strategy() -> None:
    assert len({Strategy.parse(name) for name in EVERY}) == len(EVERY)
    assert [Strategy.parse(name).base for name in EVERY] == list(NAMES)


def test_units_may_be_in_brackets() -> None:
    assert Strategy.parse(" partitioned(32) ") == Strategy.parse("partitioned:32")
    assert Strategy.parse("partitioned:32").reserved == 32
    assert Strategy.parse("dma+trimmed:8").trimmed == 8


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dna", "did you mean dma"),
        ("", "write NAME or NAME:UNITS"),
        ("partitioned", "give the number of compute units"),
        ("dma:8", "leave out ':8'"),
        ("partitioned:0", "at least 1"),
        ("partitioned:-1", "write NAME or NAME:UNITS"),
    ],
)
def test_other_names_are_refused_in_a_sentence(name: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said.replace("(", r"\(")):
        Strategy.parse(name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "dma", "reserved": 8},
        {"engine": "dma", "prioritized": True},
        {"trimmed": 8},
        {"serial": True, "reserved": 8},
        {"reserved": -1},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(Unsupported):
        Strategy(**wrong)  # type: ignore[arg-type]
