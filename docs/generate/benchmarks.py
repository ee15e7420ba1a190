"""Makes docs/benchmarks.md, and the figures of the README, from the stored results of benchmarks.

`weft bench NAME... --write docs` stores a result as docs/benchmarks/NAME.json and calls this. To
make the pages again without a measurement, run `python docs/generate/benchmarks.py`. A file
docs/generate/notes/NAME.md is added to the section of its benchmark.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTES = Path(__file__).with_name("notes")

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""In the README, what is between these lines is replaced."""

INTRODUCTION = """\
# Benchmarks

Every figure that weft promises, with its target, and whether the target is kept. This page is
written by a command; do not edit it.

```sh
weft bench all --write docs                # measure everything, then write this page
weft bench overlap fused --write docs      # measure some; the other sections stay as they are
python docs/generate/benchmarks.py         # write the page again from the stored results
```

Each section names when and where it was measured. A `+` behind a commit means that the source had
changes that were not committed. The results are stored beside this page, as `benchmarks/NAME.json`.
`network` needs root and iproute2; `collectives` compares with MPICH if mpi4py is installed, and
with DeepSpeed if that is. The other benchmarks need only weft. Times are medians of interleaved
arms of one run.

**Share of the possible gain** (`% of ideal` in tables) is 0 % for the time of `serial`, which does
not overlap, and 100 % for the longer of compute alone and communication alone:
(serial / time - 1) / (serial / ideal - 1).

Further figures have pages of their own: [how near the simulator is to measurements](fidelity.md),
and [how often `auto` is right](heuristic.md#the-split-what-it-was-built-on-and-what-judges-it).
"""

Stored = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """One row of the README's table: the first check whose name begins so, and how to write it."""

    text: str
    benchmark: str
    check: str
    show: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _share(value: float) -> str:
    return f"{100.0 * value:.1f} %"


def _times(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"


FIGURES = (
    Figure(
        "all-gather + matmul on a link as slow as its compute: share of the possible gain",
        "overlap",
        "2048x1024x2048 balanced: adaptive@dma % of ideal",
        _percent,
    ),
    Figure(
        "the same at memory speed: time of the overlapped call over the matmul alone",
        "overlap",
        "memory speed: adaptive@direct / GEMM",
        _times,
    ),
    Figure(
        "training step of a small Llama, 40 % communication: speedup over torch's parallel styles",
        "transformer",
        "weft over torch",
        _times,
    ),
    Figure(
        "decoding, one row: speedup of the in-kernel all-reduce over a matmul, then gloo",
        "fused",
        "GEMV 1x1024x1024: mv + gloo / in-kernel",
        _times,
    ),
    Figure(
        "collectives of 1 KiB: speedup over gloo",
        "collectives",
        "2 ranks, 1 KiB: gloo / weft",
        _times,
    ),
    Figure(
        "simulated GEMMs against 600 measurements of an H100 that the model was not fitted to: "
        "mean error",
        "fidelity",
        "GEMM h100 bfloat16, held out: mean error, all rows",
        _share,
    ),
)


def documents(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The page, and the README with its figures, by path below the folder."""
    stored = {name: _load(folder / "benchmarks" / f"{name}.json") for name in names}
    made = {"benchmarks.md": _page(stored)}
    readme = folder.parent / "README.md"
    if readme.is_file() and BEGIN in (text := readme.read_text("utf-8")):
        before, _, rest = text.partition(BEGIN)
        made["../README.md"] = f"{before}{BEGIN}\n{_figures(stored)}{END}{rest.partition(END)[2]}"
    return made


def _load(path: Path) -> Stored | None:
    if not path.is_file():
        return None
    loaded: Stored = json.loads(path.read_text("utf-8"))
    return loaded


def _page(stored: Mapping[str, Stored | None]) -> str:
    rows = [_overview(name, result) for name, result in stored.items()]
    heading = ("benchmark", "measured on", "kept", "missed")
    sections = [_section(name, result) for name, result in stored.items()]
    return "\n".join([INTRODUCTION, _table(heading, rows), *sections])


def _overview(name: str, result: Stored | None) -> list[str]:
    link = f"[{name}](#{name})"
    if result is None:
        return [link, "not yet", "", ""]
    missed = sum(not check["ok"] for check in result["checks"])
    kept = len(result["checks"]) - missed
    return [link, result["date"], str(kept), f"**{missed}**" if missed else "0"]


def _section(name: str, result: Stored | None) -> str:
    parts = [f"## {name}\n\n{_description(name)}\n"]
    if result is None:
        parts.append(
            f"Not measured with this version yet. `weft bench {name} --write docs` measures it.\n"
        )
    else:
        parts += [_source(name, result), _checks(result["checks"]), _details(result["rows"])]
    note = NOTES / f"{name}.md"
    if note.is_file():
        parts.append(note.read_text("utf-8"))
    return "\n".join(parts)


def _description(name: str) -> str:
    """The first paragraph of the benchmark's module, and what its function adds to it."""
    module = importlib.import_module(f"weft.benchmarks.{name}")
    first = (inspect.getdoc(module) or "").split("\n\n")[0]
    return f"{first}\n\n{inspect.getdoc(module.run) or ''}".strip()


def _source(name: str, result: Stored) -> str:
    commit = f", commit {result['commit']}" if result["commit"] else ""
    return (
        f"`weft bench {name}` on {result['date']}: {result['machine']}; Python {result['python']}, "
        f"torch {result['torch']}{commit}.\n"
    )


def _checks(checks: Sequence[Stored]) -> str:
    rows = [
        [c["name"], f"{c['value']:.3g}", c["bar"], "yes" if c["ok"] else "**MISSED**"]
        for c in checks
    ]
    return _table(("check", "value", "target", "kept"), rows)


def _details(rows: Sequence[Mapping[str, object]]) -> str:
    if not rows:
        return ""
    cells = [["" if cell is None else str(cell) for cell in row.values()] for row in rows]
    table = _table(tuple(rows[0]), cells)
    return f"<details><summary>all {len(rows)} rows</summary>\n\n{table}\n</details>\n"


def _figures(stored: Mapping[str, Stored | None]) -> str:
    return _table(
        ("what", "figure", "target", "kept", "command"), [_figure(f, stored) for f in FIGURES]
    )


def _figure(figure: Figure, stored: Mapping[str, Stored | None]) -> list[str]:
    command = f"`weft bench {figure.benchmark}`"
    result = stored.get(figure.benchmark)
    if result is None:
        return [figure.text, "not measured yet", "", "", command]
    check = next((c for c in result["checks"] if c["name"].startswith(figure.check)), None)
    if check is None:
        raise LookupError(f"weft bench {figure.benchmark} has no check {figure.check!r} any more")
    sign, bound = check["bar"].split()
    words = "at most" if sign == "<=" else "at least"
    target = f"{words} {figure.show(float(bound))}"
    kept = "yes" if check["ok"] else "**no**"
    return [figure.text, figure.show(check["value"]), target, kept, command]


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |\n" for line in lines)


if __name__ == "__main__":
    from weft import benchmarks

    FOLDER = Path(__file__).parents[1]
    for place, text in documents(FOLDER, benchmarks.names()).items():
        (FOLDER / place).write_text(text, "utf-8")
