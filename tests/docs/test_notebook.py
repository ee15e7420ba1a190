"""The notebook of the documents runs, and shows what it was stored with."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"
LONGEST = 900
"""Seconds that a cell may take. The slowest takes four, and up to a minute on a machine with 15
busy processes for each core."""


def _shown(cell: nbformat.NotebookNode) -> list[str]:
    """The lines that a cell prints, in any order of the ranks, and the kinds of what it shows."""
    lines: list[str] = []
    for output in cell.get("outputs", []):
        if output.get("name") == "stderr":  # what libraries say of the machine
            continue
        lines += output.get("text", "").splitlines() or sorted(output.get("data", {}))
    return sorted("time" if " ms " in line else line for line in lines)


def test_the_notebook_runs_and_is_stored_with_its_outputs():
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(fresh, timeout=LONGEST, kernel_name="python3").execute()
    cells = [[cell for cell in one.cells if cell.cell_type == "code"] for one in (stored, fresh)]
    shown = [[_shown(cell) for cell in some] for some in cells]
    assert shown[1] == shown[0]
    assert sum(map(bool, shown[0])) >= 6
    assert NOTEBOOK.stat().st_size < 60_000
