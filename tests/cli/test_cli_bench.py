"""`weft bench`: pass marks decide the exit code, and documents are written where asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from weft import benchmarks
from weft.benchmarks import Check, Result


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every benchmark give this result."""

    def use(value: float, found: object = None) -> None:
        given = Result(("what", "value"), [["it", value]], [Check("it", value, "<= 1")], found)
        monkeypatch.setattr(benchmarks, "find", lambda name: lambda report: given)

    return use


def test_documents_are_written_below_the_folder(weft, result, tmp_path: Path) -> None:
    result(0.5, "words")
    (tmp_path / "generate").mkdir()
    (tmp_path / "generate" / "fidelity.py").write_text(
        "def documents(found):\n    return {'fidelity.md': found, 'images/plot.md': found * 2}\n"
    )
    done = weft("bench", "fidelity", "--write", ".")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fidelity.md").read_text() == "words"
    assert (tmp_path / "images" / "plot.md").read_text() == "wordswords"


def test_a_missed_bar_is_an_exit_code_of_one(weft, result) -> None:
    result(1.5)
    assert "MISSED" in (done := weft("bench", "fidelity")).stdout
    assert done.returncode == 1
    done = weft("bench", "fidelity", "--json")
    assert json.loads(done.stdout)["checks"] == [
        {"name": "it", "value": 1.5, "bar": "<= 1", "ok": False}
    ]


def test_bad_calls(refused: Callable[..., str], result) -> None:
    assert "did you mean fidelity" in refused("bench", "fidelty")
    assert "there is no such folder" in refused("bench", "fidelity", "--write", "none")
    result(0.5)
    assert "has no documents to write" in refused("bench", "overlap", "--write", ".")
