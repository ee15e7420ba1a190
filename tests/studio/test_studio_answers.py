"""What the studio is asked and what it answers, without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from weft.errors import Unsupported
from weft.machine import load
from weft.studio import answers, presets, snippets
from weft.studio.changes import Changes
from weft.studio.state import State
from weft.study.exploration import explore
from weft.study.scenarios import Shape

SMALL = State(m=4096, n=8192, k=4096, world=4)
CHANGED = replace(
    SMALL, link=100.0, latency=2.0, engines=4, launch=2.0, contention=0.5, captured=True
)


def test_a_state_survives_its_link() -> None:
    assert State().to_query() == ""
    for state in (SMALL, CHANGED, replace(SMALL, beside="h100", pinned="adaptive@dma")):
        assert State.from_query(dict(parse_qsl(state.to_query()))) == state


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"machine": "/etc/passwd"}, "there is no machine"),
        ({"machine": "mi300y"}, "mi300x"),
        ({"beside": "mi300x"}, "chosen twice"),
        ({"op": "matmul"}, "there is no operation"),
        ({"m": "0"}, "m must be from 1"),
        ({"m": "many"}, "a whole number"),
        ({"n": str(1 << 30)}, "n must be from 1"),
        ({"world": "1000"}, "world must be from 2"),
        ({"link": "nan"}, "link must be"),
        ({"dtype": "bool"}, "there is no dtype"),
        ({"captured": "yes"}, "must be 0 or 1"),
        ({"pinned": "x" * 100}, "too long"),
        ({"mm": "1"}, "there is no 'mm'"),
    ],
)
def test_what_is_refused(query: dict[str, str], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        State.from_query(query)


def test_quick_has_four_timelines_with_autos_choice_among_them() -> None:
    (one,) = answers.quick(SMALL)["machines"]
    names = [line["name"] for line in one["timelines"]]
    assert len(set(names)) == 4
    assert names[0] == one["baseline"]
    assert one["auto"]["name"] in names
    for line in one["timelines"]:
        ends = [start + length for start, length in zip(line["start"], line["length"], strict=True)]
        assert max(ends) == pytest.approx(line["ms"], rel=0.02)
        assert {rank for rank, _ in line["lanes"]} == {0}
    assert "alone, compute takes" in one["auto"]["why"].lower()


def test_full_agrees_with_explore_and_its_losses_add_up() -> None:
    (one,) = answers.full(SMALL)["machines"]
    shape = Shape(SMALL.m, SMALL.n, SMALL.k)
    found = explore(load("mi300x"), SMALL.op, [shape], SMALL.world).scenarios[0]
    assert one["schedules"][0]["ms"] == pytest.approx(1e3 * found.best.seconds)
    assert {row["name"] for row in one["schedules"]} >= {o.schedule.name for o in found.outcomes}
    for row in one["schedules"]:
        assert one["ideal_ms"] + sum(row["losses"].values()) == pytest.approx(row["ms"])
    assert one["verdict"].startswith(("Use ", "Do not overlap"))


def test_two_machines_are_answered_side_by_side() -> None:
    found = answers.full(replace(SMALL, beside="h100"))
    assert [one["machine"] for one in found["machines"]] == ["mi300x", "h100"]
    assert "as fast as" in found["verdict"]


def test_the_curve_has_its_crossover_where_communication_equals_compute() -> None:
    (one,) = answers.curve(SMALL)["machines"]
    rate = one["crossover"]
    (at,) = answers.quick(replace(SMALL, link=round(rate, 3)))["machines"]
    assert at["communication_ms"] == pytest.approx(at["compute_ms"], rel=0.1)


def test_a_row_of_the_map_names_the_fastest_of_each_size() -> None:
    found = answers.map_row(replace(SMALL, world=2), 3)
    assert [cell["m"] for cell in found["cells"]] == [512 << step for step in range(7)]
    assert {cell["n"] for cell in found["cells"]} == {SMALL.n}
    with pytest.raises(Unsupported, match="no row"):
        answers.map_row(SMALL, 7)


def test_an_answer_stops_when_nobody_waits() -> None:
    class GoneError(Exception):
        pass

    def check() -> None:
        raise GoneError

    with pytest.raises(GoneError):
        answers.curve(SMALL, check=check)


def test_changes_written_as_a_machine_file_are_the_same_machine(tmp_path: Path) -> None:
    for name in ("mi300x", "b200"):
        changes = replace(CHANGED.changes, captured=False)
        file = tmp_path / f"{name}-changed.toml"
        file.write_text(changes.toml(load(name)))
        read, made = load(file), changes.apply(load(name))
        assert read.links.total_bandwidth == pytest.approx(made.links.total_bandwidth)
        assert read.engines.count == made.engines.count == 4
        assert read.engines.bandwidth == pytest.approx(made.engines.bandwidth)
        assert read.launch.gap == pytest.approx(2 * load(name).launch.gap)
        for a, b in zip(read.cores.protocols, made.cores.protocols, strict=True):
            assert (a.name, a.collectives) == (b.name, b.collectives)
            assert a.bandwidth == pytest.approx(b.bandwidth)


def test_less_contention_is_never_slower() -> None:
    (busy,), (calm,) = (answers.full(replace(SMALL, contention=c))["machines"] for c in (2.0, 0.0))
    assert calm["schedules"][0]["ms"] < busy["schedules"][0]["ms"]
    assert Changes().nothing


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "all_to_all_matmul"])
def test_the_python_that_is_copied_gives_the_same_times(
    op: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = replace(SMALL, op=op, link=200.0)
    exec(snippets.python(state), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    (one,) = answers.full(state)["machines"]
    told = {row["name"]: row["ms"] for row in one["schedules"]}
    assert len(printed) > 10
    for _, name, ms, *_ in printed:
        assert float(ms) == pytest.approx(told[name], abs=2e-3)


def test_presets_and_dropped_configs_give_layers() -> None:
    for model in presets.presets(8):
        for layer in model["layers"]:
            State(**{key: layer[key] for key in ("op", "m", "n", "k")})
    config = (
        b'{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2,'
        b' "num_attention_heads": 32, "intermediate_size": 11008}'
    )
    found = presets.read_config(config, 8)
    assert {layer["op"] for layer in found["layers"]} == {
        "all_gather_matmul",
        "matmul_reduce_scatter",
    }
    for bad in (b"{", b"[]", b"{}", b" " * (presets.MOST_BYTES + 1), b"[" * 100_000):
        with pytest.raises(Unsupported):
            presets.read_config(bad, 8)
