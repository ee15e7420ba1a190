"""Machine files: what ships loads, and what cannot be a machine is refused in one sentence."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

import weft.machine
from weft.errors import Unsupported
from weft.machine import from_table, load, measurements, names
from weft.machine.cluster import load_cluster
from weft.study.layers.listing import read_layers

FOLDER = Path(weft.machine.__file__).parent


def table(name: str = "mi300x") -> dict[str, Any]:
    return {"name": name, **tomllib.loads((FOLDER / f"{name}.toml").read_text())}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The MI300X with one number replaced."""
    whole = copy.deepcopy(table())
    place = whole
    *parents, last = path.split(".")
    for parent in parents:
        place = place[parent]
    place[last] = value
    return whole


CPU = Path(__file__).with_name("two_threads.toml")


def test_the_shipped_machines_load() -> None:
    assert names() == [
        *("b200", "gb200", "h100", "h200", "mi300x", "mi325x", "mi355x", "rtxpro6000")
    ]
    for name in names():
        machine = load(name)
        assert machine.name == name
        assert machine.links.world == (72 if name == "gb200" else 8)
        assert machine.compute.rate["bfloat16"] < machine.compute.peak["bfloat16"]


def test_facts_of_the_mi300x() -> None:
    machine = load("mi300x")
    assert machine.compute.units == 304
    assert machine.links.topology == "mesh"
    assert machine.engines.count == 14
    assert machine.links.to_one_peer() * 7 == pytest.approx(machine.links.out_of_device(8))


def test_a_switch_gives_everything_to_one_peer_and_a_mesh_one_link() -> None:
    switch, mesh = load("h100").links, load("mi300x").links
    assert switch.to_one_peer() == switch.out_of_device(8) == switch.out_of_device(2)
    assert mesh.out_of_device(2) == mesh.to_one_peer() == mesh.bandwidth


def test_every_number_in_the_shipped_files_says_where_it_comes_from() -> None:
    for name in names():
        text = (FOLDER / f"{name}.toml").read_text()
        section_says = False
        for line in text.splitlines():
            if line.startswith("["):
                section_says = "#" in line
            if " = " in line and not line.startswith((" ", "#")):
                key, value = line.split(" = ", 1)
                counts_or_words = value.startswith('"') or key in ("world", "crowding_units")
                assert "#" in line or section_says or counts_or_words, f"{name}: {line}"


def test_a_file_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((FOLDER / "h100.toml").read_text().replace("units = 132", "units = 66"))
    machine = load(file)
    assert (machine.name, machine.compute.units) == ("mine", 66)
    assert load(str(file)) == machine


def test_a_host_without_tiles_fits_the_same_schema() -> None:
    machine = load(CPU)
    assert machine.compute.tiling is None
    assert machine.compute.measured[0].rate == 9e10


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mi300", "did you mean mi300x"),
        ("nothing-like-it", "no machine named 'nothing-like-it'"),
        ("no/such/file.toml", "no machine file no/such/file.toml"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        load(name)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("links.bandwith", 1.0, "unknown key links.bandwith.*did you mean bandwidth"),
        ("links.bandwidth", -1.0, "links.bandwidth must not be negative"),
        ("links.world", 0, "links.world must be more than 0"),
        ("links.bandwidth", float("nan"), "links.bandwidth must be a finite number"),
        ("links.bandwidth", float("inf"), "links.bandwidth must be a finite number"),
        ("links.topology", "torus", "links.topology must be mesh or switch or ring"),
        ("links.bandwidth", 9e11, "links.bandwidth is above links.peak_bandwidth"),
        ("compute.units", 303.5, "compute.units must be a whole number"),
        ("compute.units", "many", "compute.units must be a number, not 'many'"),
        ("compute.units", True, "compute.units must be a number, not True"),
        ("compute.sustained_share", 1.1, "compute.sustained_share must be at most 1"),
        ("compute.rate.bfloat61", 1e12, "unknown dtype bfloat61 in compute.rate.*did you mean"),
        ("compute.rate.int8", 9e15, "compute.rate.int8 is above compute.peak.int8"),
        ("compute.rate", 5, "compute.rate must be a table by dtype"),
        ("compute.tiling.tiles", [], "must hold at least one tile"),
        ("compute.tiling.tiles", {}, "must be a list of tables"),
        ("compute.saturation", {"m": 1, "n": 1, "k": 1}, "either compute.tiling or"),
        ("cores.protocols", [], "must hold at least one protocol"),
        ("cores.interference", 0.1, "unknown key cores.interference"),
        ("memory", 3, "memory must be a table"),
        ("memory.bandwidth", 6e12, "memory.bandwidth is above memory.peak_bandwidth"),
        ("title", 3, "title must be text"),
    ],
)
def test_impossible_numbers(path: str, value: Any, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        from_table(changed(path, value))


def test_a_missing_key() -> None:
    whole = table()
    del whole["engines"]["packet"]
    with pytest.raises(Unsupported, match=r"engines\.packet is missing"):
        from_table(whole)
    with pytest.raises(Unsupported, match="compute is missing"):
        from_table({"name": "x", "title": "x"})


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("units = = 3")
    with pytest.raises(Unsupported, match=r"broken\.toml is not a TOML file"):
        load(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = " + 5000 * "[" + 5000 * "]", "nests its values too deeply"),
        ("a = " + 5000 * "{b = " + "1" + 5000 * "}", "nests its values too deeply"),
        ("a = " + 9000 * "9", "is not a TOML file"),
    ],
    ids=["lists", "tables", "digits"],
)
def test_a_file_that_no_reader_can_take(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(text)
    for read in (load, load_cluster, read_layers):
        with pytest.raises(Unsupported, match=says) as refused:
            read(str(file))
        assert "\n" not in str(refused.value)


def test_measurements_by_name() -> None:
    assert len(measurements("gemm_h100")) == 600
    assert len(measurements("ficco_scenarios")) == 16
    with pytest.raises(Unsupported, match="did you mean gemm_h100"):
        measurements("gemm_h10")
