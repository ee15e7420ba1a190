"""`weft bench`: pass marks decide the exit code, and documents are written where asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from weft import benchmarks
from weft.benchmarks import Check, Result
from weft.errors import Unsupported


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


PAGE = """
from __future__ import annotations

import json
from dataclasses import dataclass

@dataclass(frozen=True)
class Figure:
    text: str

def documents(folder, names):
    stored = [json.loads(p.read_text()) for p in sorted((folder / "benchmarks").glob("*.json"))]
    return {"benchmarks.md": " ".join(s["benchmark"] + str(s["checks"][0]["ok"]) for s in stored)}
"""


def test_results_are_stored_and_their_page_is_made(weft, result, tmp_path: Path) -> None:
    (tmp_path / "generate").mkdir()
    (tmp_path / "generate" / "benchmarks.py").write_text(PAGE)
    result(0.5)
    assert weft("bench", "overlap", "fused", "--write", ".").returncode == 0
    stored = json.loads((tmp_path / "benchmarks" / "overlap.json").read_text())
    assert stored["rows"] == [{"what": "it", "value": 0.5}]
    assert "cores" in stored["machine"]
    assert stored["date"].startswith("20")
    assert stored["commit"] is None, "a folder that is in no checkout has no commit"
    result(2.0)
    assert weft("bench", "fused", "--write", ".").returncode == 1
    assert (tmp_path / "benchmarks.md").read_text() == "fusedFalse overlapTrue"


def test_all_benchmarks_run_though_one_cannot(weft, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Callable[..., Result]:
        def run(report: object) -> Result:
            if name == "network":
                raise Unsupported("this needs root")
            return Result(("what",), [["it"]], [Check("it", 0.5, "<= 1")])

        return run

    monkeypatch.setattr(benchmarks, "find", find)
    done = weft("bench", "all", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert list(found) == [name for name in benchmarks.names() if name != "network"] + ["network"]
    assert found["network"] == {"error": "this needs root"}
    ended = weft("bench", "all").stdout
    kept = len(benchmarks.names()) - 1
    assert f"{kept} of {kept} targets are kept, 0 missed." in ended
    assert "network could not be measured: this needs root" in ended


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


def test_a_quick_run_judges_nothing_and_is_not_stored(
    weft, refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check("adaptive@dma % of ideal", 2.0, "<= 1")
    given = Result(("what", "of ideal %"), [["it", 2.0]], [check])
    with pytest.raises(Unsupported, match=r"c3 has no quick form; these have one: .*overlap"):
        benchmarks.find_quick("c3")
    monkeypatch.setattr(benchmarks, "find_quick", lambda name: lambda report: given)
    done = weft("bench", "--quick")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "weft bench overlap --quick: some small cases, not the benchmark" in said
    assert "not judged" in said
    assert "MISSED" not in said
    assert "share of gain" in said
    assert "of ideal" not in said
    assert json.loads(weft("bench", "--quick", "--json").stdout)["quick"] is True
    assert "too short to be stored" in refused("bench", "overlap", "--quick", "--write", ".")
    assert "say which" in refused("bench")
