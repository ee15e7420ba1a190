"""Checks of machine files find all mistakes and unlikely numbers; templates are complete."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weft.machine
from weft.errors import Unsupported
from weft.machine import load, names
from weft.machine.checking import check
from weft.machine.loading import file_of, read_table
from weft.machine.template import meanings, template

FOLDER = Path(weft.machine.__file__).parent


def changed(**values: Any) -> dict[str, Any]:
    """The H100 with some numbers replaced, by paths with __ for dots; None removes one."""
    whole = copy.deepcopy(read_table(FOLDER / "h100.toml"))
    for path, value in values.items():
        *parents, last = path.split("__")
        place = whole
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return whole


@pytest.mark.parametrize("name", names())
def test_shipped_machines_are_believed(name: str) -> None:
    machine, findings = check(read_table(FOLDER / f"{name}.toml"), name)
    assert findings == []
    assert machine == load(name)


def test_all_mistakes_are_found_at_once() -> None:
    table = changed(
        compute__units=-3,
        links__topolgy="switch",
        links__topology=None,
        memory__latency="short",
        engines__zzz=1.0,
        compute__rate__bfloat61=1e12,
    )
    table["cores"]["protocols"][0]["latncy"] = 1e-6
    machine, findings = check(table, "mine")
    assert machine is None
    texts = {one.key: one.text for one in findings}
    assert all(one.error for one in findings)
    assert "must not be negative" in texts["compute.units"]
    assert "did you mean topology" in texts["links.topolgy"]
    assert "is missing" in texts["links.topology"]
    assert "must be a number, not 'short'" in texts["memory.latency"]
    assert "[engines] may have: count, bandwidth" in texts["engines.zzz"]
    assert "did you mean latency" in texts["cores.protocols[0].latncy"]
    assert "unknown dtype bfloat61" in texts["compute.rate"]
    assert len(findings) == 7


def test_what_only_the_whole_shows_is_an_error_too() -> None:
    machine, (finding,) = check(changed(memory__bandwidth=9e12), "mine")
    assert machine is None
    assert finding.error
    assert "above memory.peak_bandwidth" in finding.text


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("links__latency", 1.5, "looks like microseconds: write 1.5e-06"),
        ("launch__host", 5, "looks like microseconds: write 5e-06"),
        ("memory__capacity", 80, "looks like GB: write 8e"),
        ("compute__clock", 1.83, "looks like GHz: write 1.83e"),
        ("links__interference", 2.0, "more than double"),
        ("memory__unit_bandwidth", 4e9, "never reached"),
        ("memory__cache_bandwidth", 1e12, "slower than the memory"),
        ("compute__loaded_clock", 2.5e9, "above the boost clock"),
        ("cores__all_gather_units", 500, "than there are"),
        ("compute__rate__float8", 300e12, "slower than bfloat16"),
        ("compute__rate__bfloat16", 200e12, "20 % of the peak"),
    ],
)
def test_unlikely_numbers_are_doubted(path: str, value: float, words: str) -> None:
    machine, findings = check(changed(**{path: value}), "mine")
    assert machine is not None
    found = [one for one in findings if one.key == path.replace("__", ".")]
    assert any(words in one.text for one in found), findings
    assert not any(one.error for one in findings)


@pytest.mark.parametrize("name", names())
def test_a_template_is_the_same_machine_with_meanings(name: str, tmp_path: Path) -> None:
    known = load(name)
    text = template(file_of(name).read_text(), name, known.title, "mine.toml")
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert load(file) == replace(known, name="mine")
    assert "weft machine check mine.toml" in text
    if name == "h100":
        assert "# one small remote write or read\nlatency = 1.5e-6 # h100: estimated" in text


def test_every_number_of_a_machine_has_a_meaning() -> None:
    def keys(table: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for key, value in table.items():
            if isinstance(value, dict):
                found |= keys(value, f"{prefix}{key}.")
            elif isinstance(value, list):
                if value and isinstance(value[0], dict):
                    found |= keys(value[0], f"{prefix}{key}.")
            else:
                found.add(prefix + key)
        return found

    table = tomllib.loads((FOLDER / "b200.toml").read_text())
    by_dtype = ("compute.peak.", "compute.rate.", "compute.tiling.tiles.")
    missing = {k for k in keys(table) if k not in meanings() and not k.startswith(by_dtype)}
    assert missing <= {"title", "cores.protocols.name"}
    assert {"compute.peak", "compute.rate"} <= set(meanings())


def test_a_base_gives_what_a_file_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'base = "h100"\ntitle = "Mine"\n[memory]\ncapacity = 94e9\n[compute.rate]\nint8 = 1e15\n'
    )
    mine, h100 = load(tmp_path / "mine.toml"), load("h100")
    assert (mine.name, mine.title, mine.memory.capacity) == ("mine", "Mine", 94e9)
    assert mine.compute.rate == {**h100.compute.rate, "int8": 1e15}
    assert replace(mine.memory, capacity=h100.memory.capacity) == h100.memory
    (tmp_path / "next.toml").write_text('base = "mine.toml"\n[links]\nworld = 4\n')
    assert load(tmp_path / "next.toml") == replace(
        mine, name="next", links=replace(mine.links, world=4)
    )


def test_a_base_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    (tmp_path / "c.toml").write_text('base = "h10"\n')
    with pytest.raises(Unsupported, match="leads back to itself"):
        load(tmp_path / "a.toml")
    with pytest.raises(Unsupported, match="did you mean h100"):
        load(tmp_path / "c.toml")
