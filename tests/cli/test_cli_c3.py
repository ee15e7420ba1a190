"""`weft c3`: tables that fit, plain data, a page, what-ifs, and plain refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def test_tables_and_page(weft, tmp_path: Path) -> None:
    done = weft("c3", "--html", "page.html")
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    for words in ("dma+trimmed", "GC-equal", "what to launch first", "page: page.html"):
        assert words in done.stdout
    page = (tmp_path / "page.html").read_text("utf-8")
    for words in ("The ladder", "Who slows whom", "What compute units are worth", "Timelines"):
        assert f"<h2>{words}</h2>" in page


def test_json_and_what_if(weft) -> None:
    percents = {}
    for arguments in ((), ("--interference", "0")):
        found = json.loads(weft("c3", "--json", *arguments).stdout)
        assert found["machine"] == "mi300x"
        assert not found["measured"]
        assert len(found["scenarios"]) == 30
        percents[arguments] = {s["name"]: s["percent_of_ideal"] for s in found["strategies"]}
    told, calm = percents.values()
    assert all(calm[name] > told[name] for name in told)


def test_bad_calls(refused: Callable[..., str]) -> None:
    assert "did you mean mi300x" in refused("c3", "--machine", "mi300")
    assert "2 or more" in refused("c3", "--world", "1")
    assert "2 ranks or more" in refused("c3", "--machine", "cpu", "--world", "1")
    assert "leave out --interference" in refused("c3", "--machine", "cpu", "--interference", "0.1")
    assert "there is no folder" in refused("c3", "--html", "nowhere/page.html")


OWN = ("--m", "8192", "--n-per-rank", "4096", "--k", "4096", "--size", "32MiB")
NAMES = ("serial", "concurrent", "prioritized", "partitioned:", "prioritized+partitioned:", "dma")


def test_a_case_of_ones_own(weft) -> None:
    found = json.loads(weft("c3", *OWN, "--collective", "all_gather", "--json").stdout)
    assert (found["machine"], found["world"], found["dtype"]) == ("mi300x", 8, "bfloat16")
    assert (found["size_bytes"], found["total_bytes"]) == (32 << 20, 256 << 20)
    quickest = min(found["collective_ms"].values())
    assert set(found["collective_ms"]) == {"cores", "dma"}
    assert abs(found["serial_ms"] - found["gemm_ms"] - quickest) < 1e-9
    assert found["ideal_ms"] == max(found["gemm_ms"], quickest)
    names = [one["name"] for one in found["strategies"]]
    assert all(any(name.startswith(known) for name in names) for known in NAMES)
    for one in found["strategies"]:
        assert set(one) >= {"name", "total_ms", "speedup", "percent_of_ideal"}
        assert abs(one["speedup"] - found["serial_ms"] / one["total_ms"]) < 1e-9
    assert found["use"] in names
    assert found["use"] in found["verdict"]


def test_names_are_whole_in_80_columns(weft, narrow) -> None:
    done = weft("c3", *OWN, "--machine", "mi300x,h100")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    for name in NAMES:
        assert sum(line.strip(" >").startswith(name) for line in lines) >= 2
    assert "…" not in done.stdout
    assert "use dma" in done.stdout
    assert "is the quickest" in lines[-1]
    done = weft("c3")
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert sum(line.strip().startswith("prioritized+partitioned ") for line in lines) == 1
    assert sum(line.strip().startswith("cb1-448M ag ") for line in lines) == 1
    assert "…" not in done.stdout


def test_two_machines_as_data(weft) -> None:
    arguments = ("--machine", "h100,h200", "--collective", "all_reduce", "--json")
    found = json.loads(weft("c3", *OWN, *arguments).stdout)
    assert [one["machine"] for one in found["machines"]] == ["h100", "h200"]
    assert "is the quickest" in found["verdict"]
    assert all("dma" in one["refused"] for one in found["machines"])


def test_bad_cases_of_ones_own(refused: Callable[..., str]) -> None:
    for arguments, words in (
        (("--m", "64"), "needs all of --m, --n, --k and --size"),
        (("--m", "0", *OWN[2:]), "m must be from 1"),
        ((*OWN[:6], "--size", "0"), "at least 1 byte"),
        ((*OWN[:6], "--size", "-3"), "is not a size"),
        ((*OWN[:6], "--size", "many"), "is not a size"),
        ((*OWN, "--collective", "gather"), "no collective 'gather' (did you mean all_gather"),
        ((*OWN, "--dtype", "bf16"), "no dtype 'bf16'"),
        ((*OWN, "--world", "9"), "has 8 devices"),
        ((*OWN, "--world", "1"), "2 ranks or more"),
        ((*OWN, "--machine", "h10"), "did you mean h100"),
        ((*OWN, "--machine", "h100,h100"), "named twice"),
        ((*OWN, "--machine", ","), "name a machine"),
        ((*OWN, "--machine", "cpu"), "is simulated"),
        ((*OWN, "--html", "page.html"), "there is no page"),
    ):
        assert words in refused("c3", *arguments)
