"""`weft characterize`: a table that fits, plain data, a page, and plain refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.cli import characterize as command
from weft.study.characterization import characterize, shapes_of

FEW = shapes_of(((512, 8192), (1024,), (1024, 16384)), "bfloat16")


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command, "simulate", lambda machine, report: characterize(machine, FEW, report)
    )


def test_table_and_page(weft, tmp_path: Path) -> None:
    done = weft("characterize", "--machine", "mi300x", "--html", "page.html")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 100 for line in lines)
    for header in ("op/byte", "MB", "M/8", "M/64", "K/8", "K/64", "dma", "cores"):
        assert header in lines[1]
    assert "beside cores" in done.stdout
    page = (tmp_path / "page.html").read_text("utf-8")
    for words in (
        "Cost of splitting",
        "Is my GEMM safe to cut?",
        "operations per byte",
        "memory traffic",
    ):
        assert words in page


def test_json(weft) -> None:
    done = weft("characterize", "--machine", "h100", "--json")
    found = json.loads(done.stdout)
    assert found["machine"] == "h100"
    assert [(s["m"], s["k"]) for s in found["shapes"]] == [
        (512, 1024),
        (512, 16384),
        (8192, 1024),
        (8192, 16384),
    ]


def test_bad_calls(refused: Callable[..., str]) -> None:
    assert "did you mean mi300x" in refused("characterize", "--machine", "mi300")
    assert "there is no folder" in refused("characterize", "--html", "no/page.html")
