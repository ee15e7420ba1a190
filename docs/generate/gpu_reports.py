"""`python docs/generate/gpu_reports.py` writes the table of docs/gpu-reports/README.md from the
report files beside it. A test checks that the page is up to date."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "gpu-reports"

HEAD = """# Reports from GPUs

weft was written and tested without a GPU ([status on GPUs](../gpu.md)). This page lists where it
was seen to work. Each row is a file in this folder, as `weft doctor --gpu --json` wrote it.

"""
NONE = "No report has come in yet: **weft has not been run on a GPU.**\n"
FOOT = """
## Sending a report

```sh
pip install 'weft[triton]'
weft doctor --gpu --json > report.json
```

It takes a few minutes and at least two GPUs of one machine; with one GPU, ranks share it, and who
copies cannot be found out. Open an issue with the form "GPU report" and attach the file, whatever
it says. It has no host names, user names or paths; look through it before you send it. A file that
is accepted is put into this folder, and `python docs/generate/gpu_reports.py` adds its row.
"""


def render(reports: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The page for reports: (file name, content)."""
    if not reports:
        return HEAD + NONE + FOOT
    lines = ["| devices | driver | who copies | checks that pass | report |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, report in reports:
        checks = report["checks"]
        version = next((c["found"] for c in checks if c["what"].endswith(" driver")), "unknown")
        copies = [c for c in checks if c["point"] == "who copies" and c["found"] in KINDS]
        engine = sum(c["found"] == "engine" for c in copies)
        who = f"engine for {engine} of {len(copies)}" if copies else "not found out"
        judged = [c for c in checks if c["point"] != "not checked"]
        passed = f"{sum(c['state'] == 'ok' for c in judged)} of {len(judged)}"
        device = f"{report['world']} x {report['title']}"
        lines.append(f"| {device} | {version} | {who} | {passed} | [{name}]({name}) |")
    return HEAD + "\n".join(lines) + "\n" + FOOT


KINDS = ("engine", "kernel")


def found(folder: Path = FOLDER) -> list[tuple[str, dict[str, Any]]]:
    """The reports of a folder, by name."""
    return [(path.name, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(render(found()))
