"""`weft explore --collective` on one node: every way by size, the fastest marked, a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Refused = Callable[..., str]


def test_every_way_with_the_fastest_marked_and_a_verdict(weft) -> None:
    done = weft("explore", "--collective", "all_gather", "--machine", "mi300x")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()}
    for name in ("pcpy", "bcst+prelaunch", "b2b+prelaunch", "cores", "direct", "ring"):
        assert len(rows[name]) <= 80
    assert rows["b2b+prelaunch"].count("*") == 1
    assert rows["pcpy+prelaunch"].count("*") == 2
    assert "*" not in rows["direct"]
    said = " ".join(done.stdout.split())
    assert "fixed cost to start and end" in said
    assert "swap, swap+prelaunch: all_gather cannot be made of swap" in said
    assert all(len(line) <= 80 for line in lines), "tables and sentences"
    assert said.endswith(
        "Fastest for all_gather on 8 ranks of mi300x: b2b+prelaunch at 64 KiB, bcst+prelaunch at "
        "1 MiB, pcpy+prelaunch from 16 MiB to 1 GiB. Copy engines beat cores at every size."
    )


def test_json_keeps_the_keys_of_a_cluster_and_adds_the_ways(weft) -> None:
    done = weft("explore", "--collective", "all_reduce", "--size", "64KiB,1GiB", "--json")
    found = json.loads(done.stdout)
    assert (found["collective"], found["cluster"]) == ("all_reduce", "mi300x")
    small, large = found["answers"]
    assert (small["nodes"], small["devices"], small["size"]) == (1, 8, 65536)
    assert {"direct", "ring"} <= {answer["algorithm"] for answer in small["algorithms"]}
    assert (small["best"], large["best"]) == ("cores", "pcpy+prelaunch")
    by_name = {way["name"]: way for way in large["ways"]}
    assert (by_name["cores"]["source"], by_name["b2b"]["source"]) == ("closed form", "simulated")
    best = by_name["pcpy+prelaunch"]
    assert best["us"] == min(way["us"] for way in large["ways"] if way["by"] != "links")
    assert best["us"] >= large["bound_us"]
    assert best["bus_GB_per_s"] == pytest.approx(2 * 2**30 * 7 / 8 / best["us"] / 1e3)
    assert found["verdict"].startswith("Fastest for all_reduce")


def test_one_way_alone_and_a_trace_of_its_plan(weft, tmp_path: Path) -> None:
    asked = ("explore", "--collective", "all_to_all", "--algorithm", "swap+prelaunch")
    done = weft(*asked, "--size", "1MiB", "--trace", "t.json")
    assert done.returncode == 0, done.stderr
    assert "pcpy" not in done.stdout
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"1 MiB swap+prelaunch · rank 0"}
    assert any(event["name"].startswith("swap with") for event in events)


@pytest.mark.parametrize("kind", ["broadcast", "gather", "scatter"])
def test_kinds_with_a_root(weft, kind: str) -> None:
    done = weft("explore", "--collective", kind, "--machine", "h100", "--size", "1MiB", "--json")
    (answer,) = json.loads(done.stdout)["answers"]
    assert answer["bound_us"] is None
    assert {way["by"] for way in answer["ways"]} == {"engines"}
    assert "no measured rates" in answer["refused"]["cores"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--collective", "barrier"), "a barrier moves no bytes"),
        (("--collective", "reduce"), "copy engines have no commands for reduce"),
        (("--collective", "broadcast", "--nodes", "2"), "broadcast has no algorithms on a cluster"),
        (("--collective", "all_gather", "--algorithm", "pcpi"), "no algorithm 'pcpi'"),
        (
            ("--collective", "all_gather", "--algorithm", "cores", "--trace", "t.json"),
            "none of these ways has a plan to trace",
        ),
    ],
)
def test_bad_calls_end_in_one_sentence(
    refused: Refused, arguments: tuple[str, ...], words: str
) -> None:
    assert words in refused("explore", *arguments)
