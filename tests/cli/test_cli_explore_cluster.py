"""`weft explore --collective` and `--workload`: tables that fit, JSON, pages, plain refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Refused = Callable[..., str]

CLUSTER = """
nodes = 2
[links]
devices = 4
topology = "ring"
bandwidth = 1e10
latency = 1e-6
[nics]
count = 4
bandwidth = 5e9
latency = 2e-6
[network]
topology = "switch"
"""


def test_algorithms_beside_the_bound(weft) -> None:
    done = weft("explore", "--collective", "all_gather", "--size", "64KiB,1GiB", "--nodes", "1,16")
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    for word in ("hierarchical", "direct", "ring", "halving-doubling", "64 KiB", "bound"):
        assert word in done.stdout
    assert "links of a device (1 node)" in done.stdout.replace("\n", " ")


def test_a_cluster_of_ones_own_as_json(weft, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CLUSTER)
    asked = ("--machine", "mine.toml", "--collective", "all_reduce", "--size", "8e6", "--json")
    done = weft("explore", *asked, "--algorithm", "ring", "--trace", "trace.json")
    found = json.loads(done.stdout)
    assert (found["collective"], found["cluster"]) == ("all_reduce", "mine")
    (answer,) = found["answers"]
    assert (answer["nodes"], answer["devices"], answer["size"]) == (2, 8, 8e6)
    (ring,) = answer["algorithms"]
    # 8 devices, 14 rounds of a shard, of which a quarter crosses the cards and the rest the ring.
    shard = 1e6
    inside, across = shard * 3 / 4 / 2 / 1e10, shard / 4 / 5e9
    assert ring["us"] == pytest.approx(14 * (2 + 1e6 * max(inside, across)), rel=0.02)
    assert ring["over_bound"] > 1
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "all_reduce" for event in events)


def test_a_workload_scales_in_two_tables(weft, tmp_path: Path) -> None:
    asked = ("explore", "--workload", "dlrm", "--nodes", "1..4")
    done = weft(*asked, "--html", "page.html", "--trace", "t.json")
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines() if "toml" not in line)
    assert "weak scaling: 512 samples per device" in done.stdout
    assert "strong scaling" in done.stdout
    assert "dlrm.toml" in done.stdout
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.rstrip().endswith("</html>")
    for words in ("Weak scaling", "Strong scaling", "Assumptions", "lookup_share", "update_passes"):
        assert words in page
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"plain · rank 0", "fused · rank 0"}


@pytest.mark.parametrize("name", ["dlrm", "llama", "moe"])
def test_workloads_as_json(weft, name: str) -> None:
    done = weft("explore", "--workload", name, "--nodes", "2", "--scaling", "weak", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workload"] == name
    assert found["assumptions_file"].endswith(f"{name}.toml")
    assert found["assumptions"]["dtype"] == "bfloat16"
    (point,) = found["points"]
    assert (point["nodes"], point["devices"], point["scaling"]) == (2, 16, "weak")
    assert point["saving"] == pytest.approx(1 - point["fused_ms"] / point["plain_ms"])
    assert sum(point["plain_parts_ms"].values()) > point["plain_exposed_ms"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--collective", "all_gathr"), "no collective 'all_gathr' (did you mean all_gather"),
        (("--collective", "all_gather", "--size", "5 apples"), "'5 apples' is not a size"),
        (("--collective", "all_gather", "--size", "1e30"), "at most 2^60"),
        (("--collective", "all_gather", "--size", "-5"), "'-5' is not a size"),
        (("--collective", "all_gather", "--nodes", "0"), "not a range of nodes from 1"),
        (("--collective", "all_gather", "--nodes", "4..2"), "not a range of nodes from 1"),
        (("--collective", "all_gather", "--nodes", "x"), "'x' is not a number of nodes"),
        (("--collective", "all_gather", "--algorithm", "rings"), "no algorithm 'rings'"),
        (("--collective", "all_gather", "--html", "no/p.html"), "there is no folder no"),
        (("--collective", "all_gather", "--workload", "dlrm"), "one at a time"),
        (("--workload", "dlrm", "--m", "5"), "one at a time"),
        (("--workload", "dlrn"), "no workload 'dlrn' (did you mean dlrm"),
        (("--workload", "dlrm", "--model", "none.toml"), "no model 'none.toml' of dlrm"),
        (("--workload", "dlrm", "--scaling", "up"), "scaling is weak, strong or both, not 'up'"),
        (("--workload", "dlrm", "--machine", "mi300"), "named 'mi300' (did you mean mi300x"),
        (("--workload", "dlrm", "--html", "no/p.html"), "there is no folder no"),
        (("--workload", "dlrm", "--nodes", "33"), "33 nodes do not fill leaf switches of 32"),
        (("--m", "64", "--n", "64", "--k", "64", "--nodes", "16"), "up to 64 of them, not 128"),
        (("--scenarios", "ficco", "--nodes", "2"), "on several nodes, ask about one shape"),
    ],
)
def test_bad_calls_end_in_one_sentence(
    refused: Refused, arguments: tuple[str, ...], words: str
) -> None:
    assert words in refused("explore", *arguments)


def test_a_shape_over_two_nodes(weft) -> None:
    shape = ("--m", "4096", "--n", "4096", "--k", "1024", "--schedule", "serial,adaptive")
    done = weft("explore", *shape, "--nodes", "1,2", "--json")
    one, two = json.loads(done.stdout)
    assert (one["nodes"], two["nodes"]) == (1, 2)
    assert two["communication_ms"] > one["communication_ms"]
    said = weft("explore", *shape, "--nodes", "2").stdout
    assert "4096x256x1024 bfloat16 on 16 ranks" in said
    assert "share of gain" in said


def test_a_cluster_without_compute_says_so(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CLUSTER)
    said = refused("explore", "--workload", "moe", "--machine", "mine.toml", "--nodes", "2")
    assert 'give it machine = "mi300x"' in said
