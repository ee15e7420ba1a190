"""Every command that prints a table holds at 80 columns, breaks no name, ends with a verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from weft.benchmarks import Check, Result
from weft.cli import bench, calibrate, console, doctor_gpu, soak, triton, tune
from weft.machine import load, names
from weft.machine.description import HostCores
from weft.measure.gpu.finding import POINTS, Examination, Finding
from weft.measure.soak.soaking import Findings
from weft.schedule import Schedule
from weft.select import store

SHAPE = ("--m", "16384", "--n", "28672", "--k", "8192")
LAYERS = Path(__file__).parents[2] / "examples" / "layers.toml"
GEMM = ("--m", "8192", "--n", "8192", "--k", "8192")

COMMANDS = {
    "one shape": ("explore", *SHAPE),
    "auto": ("explore", *SHAPE, "--schedule", "auto"),
    "several shapes": ("explore", "--shapes", "mine.csv", "--planned"),
    "two machines": ("explore", *SHAPE, "--machine", "mi300x,h100"),
    "nodes": ("explore", *SHAPE, "--nodes", "2", "--schedule", "serial,adaptive"),
    "collective": ("explore", "--collective", "all_gather"),
    "collective of a cluster": (
        *("explore", "--collective", "all_reduce", "--machine", "h100"),
        *("--nodes", "2", "--size", "256MiB"),
    ),
    "workload": ("explore", "--workload", "dlrm", "--machine", "mi300x", "--nodes", "1,2"),
    "c3": ("c3", "--machine", "mi300x", "--world", "3"),
    "own c3": ("c3", *GEMM, "--size", "64MiB", "--machine", "mi300x,h100"),
    "characterize": ("characterize", "--machine", "mi300x"),
    "judge": ("judge", "--random", "2"),
    "machines": ("machine", "list"),
    "price": ("price", "gemm", *GEMM, "--machine", "mi300x,h100"),
    "run": ("run", "all_gather_matmul", "--m", "64", "--n", "64", "--k", "64", "--repeat", "2"),
    "doctor": ("doctor",),
    "layers": ("explore", "--layers", str(LAYERS)),
}
VERDICTS = {
    "one shape": "Use uniform-fused-1d@dma: 1.17x over serial",
    "auto": "auto chooses it.",
    "several shapes": "Overlap gives",
    "two machines": "is the quickest",
    "nodes": "over serial",
    "collective": "Fastest for all_gather",
    "collective of a cluster": "x the bound.",
    "c3": "Use dma+trimmed",
    "own c3": "is the quickest",
    "characterize": "Is my GEMM safe to cut?",
    "judge": "slower than best",
    "run": "Nothing is crowned: ",
    "doctor": "weft works here.",
}


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.usefixtures("narrow")
def test_tables_hold_at_80_columns(what: str, weft: Callable, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("id,m,n,k\na,4096,4096,1024\n,1048576,8192,512\n")
    done = weft(*COMMANDS[what])
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in done.stdout
    assert VERDICTS.get(what, "") in " ".join(done.stdout.split())
    assert re.search(r"[.)]$|\.toml$", lines[-1]), f"a sentence comes last, not {lines[-1]!r}"
    # Names stand whole: no word of a table is the rest of one that was cut.
    for line in lines:
        for word in line.split():
            if "@" in word:
                assert re.fullmatch(r"[\w:+-]+@(dma|cores|direct)[.,;:)]*", word.lstrip("(")), word


def test_the_names_of_all_machines_stand_in_the_list(weft: Callable, narrow: None) -> None:
    first = [
        line.split()[0] for line in weft("machine", "list").stdout.splitlines() if line.strip()
    ]
    assert set(names()) <= set(first)


@pytest.mark.parametrize(
    ("columns", "width"), [("80", 80), ("123", 123), ("", console.WIDTH), ("x", console.WIDTH)]
)
def test_columns_count_where_the_output_is_no_terminal(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console._width() == width


def test_benchmarks_hold_at_80_columns(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    check = Check(
        "a check with a name of many words that goes on and on for a while", 1.0, ">= 0.5"
    )
    headers = ("case", "schedule", "ms", "speedup", "of ideal %", "GEMM slowdown", "more", "again")
    row = ["4096x1024x1024 float32", "hetero-unfused-2d@cores", 12.5, "1.25x", 50, "1.10x", 1, 2]
    bench._print("overlap", Result(headers, [row], [check], found=None))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, map(str.rstrip, lines))) <= 80
    assert any("hetero-unfused-2d@cores" in line for line in lines)


def _calibrated() -> None:
    made = load(str(Path(__file__).parents[1] / "machine" / "two_threads.toml"))
    made = replace(made, host=HostCores(2, 1e-7, 1e-3, 1 << 16, 5e-6, 3e-3, 1e-4))
    calibrate.show(made, Path("a/folder/of/this/machine/cpu.toml"), 31.0)


def _soaked() -> None:
    calls = {"all_gather_matmul": 123456, "embedding_all_to_all": 7, "reduce_scatter_tensor": 8}
    found = Findings(1, calls=Counter(calls), lives=Counter(host=3, loom=2), seconds=60.0)
    soak.show(found)


def _compiled() -> None:
    sizes = (255, 1024, 65536, 16, 4, 128, 128)
    faults = ((), ("a store is not ordered before the word that announces it, line 12345",))
    rows = [
        triton.KernelResult("all_gather_matmul_tiles", target, "float8_e4m3fn", *sizes, one)
        for target in ("gfx942", "gfx950", "sm_90", "sm_100")
        for one in faults
    ]
    triton._show(rows)


def _examined() -> None:
    found = "a finding of many words that says what was found here, and then some more of it"
    checks = [
        Finding(point, "all_gather_matmul, 8 ranks", state, found, "do this, then try again")
        for point in POINTS
        for state in ("ok", "not", "unknown")
    ]
    made = Examination("cuda", "NVIDIA H100 80GB HBM3", 4)
    made.checks = checks
    doctor_gpu.show(made, None)


def _tuned() -> None:
    label = "all_gather_matmul 16384x28672x8192 float32 on 8 ranks"
    answer = store.Answer(Schedule.parse("hetero-unfused-2d@cores"), 0.0123, 0.0456)
    console.console.print(tune._verdict(label, "hetero-unfused-2d@cores", answer))


@pytest.mark.parametrize("shown", [_calibrated, _soaked, _compiled, _examined, _tuned])
def test_what_takes_long_to_find_out_holds_at_80_columns(
    shown: Callable[[], None], narrow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shown()
    output = capsys.readouterr().out
    lines = [line.rstrip() for line in output.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in output
    assert lines[-1].endswith((".", "`"))


def test_n_counts_all_ranks_and_both_numbers_are_printed(weft: Callable, refused: Callable) -> None:
    per_rank = ("explore", "--m", "4096", "--n-per-rank", "512", "--k", "1024")
    total = ("explore", "--m", "4096", "--n", "4096", "--k", "1024")
    chosen = ("--schedule", "serial")
    one, other = weft(*per_rank, *chosen).stdout, weft(*total, *chosen).stdout
    assert one == other
    assert "N is 4096 over all 8 ranks, 512 on each" in one
    assert "say N once" in refused(*total, "--n-per-rank", "512")
    tiny = ("run", "all_gather_matmul", "--m", "32", "--k", "32", "--repeat", "1")
    said = weft(*tiny, "--n", "64", "--schedule", "serial").stdout
    assert "all_gather_matmul 32x32x32" in said
    assert "N is 64 over all 2 ranks, 32 on each" in said
