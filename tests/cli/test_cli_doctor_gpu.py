"""`weft doctor --gpu`: what it prints, what its file leaves out, and the page made from files."""

from __future__ import annotations

import json
import platform

import pytest
import torch
import typer
from typer.testing import CliRunner

from generate import gpu_reports
from weft.cli import doctor
from weft.errors import Unsupported
from weft.machine import load
from weft.measure.gpu import device, speed
from weft.measure.gpu.examine import _not_checked
from weft.measure.gpu.finding import POINTS, Examination, Finding, anonymous

FIGURES = {"copy, bytes per second": 4e10, "product of 8192, flops per second": 6e14}


def an_examination(state="ok"):
    made = Examination("cuda", "NVIDIA H100 80GB HBM3", 4, figures=dict(FIGURES))
    made.machine = speed.machine_file(made.title, "cuda", made.figures, made.world)
    made.checks = [
        Finding(1, "cuda driver", "ok", "13.0"),
        Finding(5, "64 KiB pull", state, "engine" if state == "ok" else "kernel", "do this"),
        Finding(
            7, "all_gather_matmul", "ok", "21 exact", f"see /home/someone/x on {platform.node()}"
        ),
        *_not_checked("cuda", True),
    ]
    return made


@pytest.fixture
def run(monkeypatch):
    """The command with an examination that is already made."""
    app = typer.Typer()
    app.command()(doctor.doctor)

    def call(examination, *arguments):
        monkeypatch.setattr(doctor, "examined", lambda device, json: examination)
        return CliRunner().invoke(app, ["--gpu", *arguments])

    return call


def test_every_check_is_a_line_and_the_last_words_are_a_verdict(run):
    done = run(an_examination())
    assert done.exit_code == 0
    lines = [line.rstrip() for line in done.output.splitlines()]
    assert max(map(len, lines)) <= 100
    for text in ("1 versions", "5 who copies", "64 KiB pull", "9 not checked", "ranks share"):
        assert any(text in line for line in lines), text
    assert any(line.startswith("All checks pass on NVIDIA H100") for line in lines)
    failed = run(an_examination("not"))
    assert failed.exit_code == 1
    assert "1 check fails on NVIDIA H100" in failed.output
    assert "1 could not be found out" in run(an_examination("unknown")).output


def test_the_file_has_no_names_and_no_paths(run, tmp_path):
    target = tmp_path / "here.toml"
    done = run(an_examination(), "--json", "--machine", str(target))
    report = json.loads(done.output)
    assert report["checks"][2]["remedy"] == "see PATH on HOST"
    assert report["format"] == 1
    assert {check["point"] for check in report["checks"]} <= set(POINTS.values())
    found = load(str(target))
    assert found.engines.bandwidth == 4e10
    assert found.compute.rate["bfloat16"] == pytest.approx(6e14)
    assert "measured by weft doctor --gpu" in report["machine"]
    assert "as h100" in report["machine"]


def test_texts_are_made_anonymous():
    assert anonymous({"a": ["at /root/x/y.py:3", 4]}) == {"a": ["at PATH:3", 4]}
    assert anonymous("9.4 GB/s, and/or 3/4") == "9.4 GB/s, and/or 3/4"


def test_the_nearest_machine():
    names = [
        speed._nearest(title, kind)
        for title, kind in (
            ("NVIDIA H200", "cuda"),
            ("AMD Instinct MI300X", "hip"),
            ("NVIDIA GB200", "cuda"),
            ("AMD Radeon", "hip"),
            ("loom, an emulated device of weft", "loom"),
        )
    ]
    assert names == ["h200", "mi300x", "gb200", "mi300x", "h100"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_one_sentence():
    from weft.measure.gpu.examine import examine

    with pytest.raises(Unsupported, match="there is no GPU here that torch can use") as caught:
        examine("cuda")
    assert "\n" not in str(caught.value)


def test_an_unknown_device_is_refused():
    with pytest.raises(Unsupported, match="did you mean loom"):
        doctor.doctor(gpu=True, device="lom")


class FakeDriver:
    name = "hip"
    pitched = False

    def __init__(self, environment, peers=((True, True), (True, True)), words=True):
        from weft.fabric.device.device_driver import Facts

        self._facts = Facts("hip", "7.2.0", "unknown", words, environment, {}, peers)

    def facts(self):
        return self._facts


def test_variables_that_change_who_copies():
    given = {"HSA_ENABLE_SDMA": "0", "GPU_MAX_HW_QUEUES": "8"}
    found = {c.what: c for c in device.environment(FakeDriver(given), given)}
    assert found["HSA_ENABLE_SDMA"].state == "not"
    assert found["HSA_ENABLE_SDMA"].remedy.startswith("unset HSA_ENABLE_SDMA")
    assert found["GPU_MAX_HW_QUEUES"].state == "ok"
    assert found["ROC_P2P_SDMA_SIZE"].remedy.startswith("export ROC_P2P_SDMA_SIZE=0")


@pytest.mark.parametrize(
    ("peers", "state"),
    [
        (((True, True), (True, True)), "ok"),
        (((True, False), (True, True)), "not"),
        (((True,),), "unknown"),
        ((), "unknown"),
    ],
)
def test_devices_that_reach_each_other(peers, state):
    checks = device.topology(FakeDriver({}, peers, words=False), torch.device("cpu"))
    assert checks[0].state == state
    assert {c.what: c.state for c in checks}["streams wait for words"] == "not"


def test_the_page_of_reports_is_in_step():
    page = (gpu_reports.FOLDER / "README.md").read_text()
    assert page == gpu_reports.render(gpu_reports.found()), (
        "run: python docs/generate/gpu_reports.py"
    )
    assert "weft has not been run on a GPU" in page  # until a file says otherwise


def test_a_report_is_a_row():
    made = json.loads(json.dumps(an_examination().as_dict()))
    page = gpu_reports.render([("h100.json", made)])
    row = (
        "| 4 x NVIDIA H100 80GB HBM3 | 13.0 | engine for 1 of 1 | 3 of 3 | [h100.json](h100.json) |"
    )
    assert row in page
