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
