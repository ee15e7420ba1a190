"""Calibration: what it measures is a machine that loads, and what it writes is whole."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from host_figures import figures
from typer.testing import CliRunner

from weft.benchmarks.predict import CASES
from weft.cli import app
from weft.cli import calibrate as command
from weft.errors import Unsupported
from weft.machine import Machine, Measured, calibrated, from_table, load
from weft.measure.calibration import (
    FULL,
    QUICK,
    YARDSTICK,
    keep,
)
from weft.measure.describe import describe, fit_saturation, to_toml
from weft.measure.probes import Gemm, quartile
from weft.simulate.cost import gemm


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_without_a_calibration_the_cpu_machine_says_what_to_run(cache: Path) -> None:
    with pytest.raises(Unsupported, match="weft calibrate") as caught:
        load("cpu")
    assert str(caught.value).count(".") == 1
    assert not list(cache.iterdir())


def test_a_kept_calibration_is_the_cpu_machine(cache: Path) -> None:
    machine = describe(figures())
    path = keep(machine, QUICK)
    assert path == cache / "weft" / "machines" / "cpu.toml"
    found = load("cpu")
    assert found.name == "cpu"
    for section in ("host", "engines", "launch", "memory", "links"):
        there, here = asdict(getattr(found, section)), asdict(getattr(machine, section))
        for key, value in here.items():
            assert there[key] == (
                pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            ), key
    for there, here in zip(found.compute.measured, machine.compute.measured, strict=True):
        assert asdict(there) == {**asdict(here), "rate": pytest.approx(here.rate, rel=1e-5)}
    assert [p.name for p in path.parent.iterdir()] == ["cpu.toml"]


def test_ranks_of_several_threads_have_a_description_of_their_own(cache: Path) -> None:
    one, many = describe(figures()), describe(figures(2e11, threads=8))
    assert {keep(one, QUICK).name, keep(many, QUICK).name} == {"cpu.toml", "cpu-8-threads.toml"}
    assert calibrated.kept() == ["cpu", "cpu-8-threads"]
    found = load("cpu-8-threads")
    assert found.host is not None
    assert (found.host.threads, found.host.cores) == (8, 16)
    assert not found.limited_by_memory, "measured rates include the time of memory"
    assert gemm(found, 96, 700, 900, "float32").compute_seconds == pytest.approx(
        2 * 96 * 700 * 900 / 2e11, rel=1e-4
    )
    assert "8 threads per rank" in calibrated.path("cpu-8-threads").read_text()
    with pytest.raises(Unsupported, match=r"weft calibrate --threads 4`.* as cpu, cpu-8-threads"):
        load("cpu-4-threads")


def test_two_ranks_need_a_core_for_every_thread(cache: Path) -> None:
    threads = len(os.sched_getaffinity(0)) // 2 + 1
    result = CliRunner().invoke(_app(), ["calibrate", "--quick", "--threads", str(threads)])
    assert result.exit_code != 0
    assert isinstance(result.exception, Unsupported | SystemExit)
    assert not list(cache.iterdir())


def test_a_torn_description_says_so_and_what_to_run(cache: Path) -> None:
    path = keep(describe(figures()), QUICK)
    path.write_text(path.read_text()[:700])
    with pytest.raises(Unsupported, match="weft calibrate"):
        load("cpu")


def test_a_description_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unsupported, match="cannot write"):
        keep(describe(figures()), QUICK, tmp_path / "file" / "cpu.toml")
    (tmp_path / "taken").mkdir()
    with pytest.raises(Unsupported, match="cannot write"):
        keep(describe(figures()), QUICK, tmp_path / "taken")
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


def test_every_number_says_its_source() -> None:
    text = to_toml(describe(figures()), "full")
    for line in text.splitlines():
        if " = " in line and not line.startswith(("title", "    {")):
            assert "#" in line, line
    assert "measured here on " in text
    table = tomllib.loads(text)
    assert isinstance(from_table({"name": "cpu", **table}), Machine)


def test_figures_become_costs() -> None:
    machine = describe(figures(5e10))
    assert machine.host is not None
    assert gemm(machine, 96, 700, 900, "float32").compute_seconds == pytest.approx(
        2 * 96 * 700 * 900 / 5e10
    )
    assert machine.engines.bandwidth == pytest.approx(2**20 / 1e-4)
    assert machine.engines.row == pytest.approx(2e-4 / 1023)
    assert machine.launch.host == 1e-4


def test_the_fitted_curve_is_the_one_the_points_lie_on() -> None:
    points = [p for p in FULL.points if p.dtype == "float32"]
    rates = [9e10 / ((1 + 6 / p.m) * (1 + 20 / p.n) * (1 + 12 / p.k)) for p in points]
    curve, peak = fit_saturation(points, rates)
    assert peak == pytest.approx(9e10, rel=0.02)
    assert (curve.m, curve.n, curve.k) == pytest.approx((6, 20, 12), rel=0.08)


def test_calibration_does_not_see_the_shapes_that_judge_it() -> None:
    for level in (QUICK, FULL):
        seen = level.points
        for case in CASES:
            assert case.n not in {p.n for p in seen} or case.k not in {p.k for p in seen}
            assert Gemm("float32", case.m, case.n, case.k) not in seen


def test_the_yardstick_is_measured_at_every_level() -> None:
    assert YARDSTICK in QUICK.points
    assert YARDSTICK in FULL.points


def test_quartiles() -> None:
    assert quartile([5.0]) == 5.0
    assert quartile([4.0, 3.0, 2.0, 1.0, 100.0]) == 2.0


def test_a_quick_calibration_of_this_machine(cache: Path) -> None:
    result = CliRunner().invoke(_app(), ["calibrate", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    machine = load("cpu")
    assert Path(found["file"]) == calibrated.path()
    assert machine.host is not None
    assert machine.host.cores == len(os.sched_getaffinity(0))
    assert {p.dtype for p in machine.compute.measured} == {
        "float32",
        "float64",
        "bfloat16",
        "float16",
    }
    largest = max(_of(machine, "float32"), key=lambda p: p.m * p.n * p.k)
    smallest = min(_of(machine, "float32"), key=lambda p: p.m * p.n * p.k)
    assert largest.rate > smallest.rate
    assert machine.engines.bandwidth > 0
    assert machine.launch.host > machine.launch.kernel


def _of(machine: Machine, dtype: str) -> list[Measured]:
    return [p for p in machine.compute.measured if p.dtype == dtype]


def _app() -> object:
    if not any(c.name == "calibrate" for c in app.registered_commands):
        command.register(app)
    return app
