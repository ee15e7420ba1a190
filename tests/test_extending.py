"""weft is extended from outside: an operator, a schedule, a fabric and a machine, one file each.

The files are in tests/extending; `WEFT_PLUGINS` names them, as CONTRIBUTING.md says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft.machine
import weft.plugins

FILES = Path(__file__).parent / "extending"
OPERATOR, SCHEDULE, FABRIC = (FILES / f"{name}.py" for name in ("sum_rows", "thirds", "counted"))

SCRIPT = """
import json, torch, torch.distributed as dist, weft
from weft_plugin_sum_rows import sum_rows
dist.init_process_group("gloo")
rank = dist.get_rank()
y = sum_rows(torch.full((7, 3), float(rank + 1)), schedule="thirds")
assert torch.equal(y, torch.full((7, 3), 3.0))
said = weft.explain()
z = sum_rows(torch.ones(2, 2))  # auto
assert torch.equal(z, torch.full((2, 2), 2.0))
try:
    sum_rows(torch.ones(4, 4), schedule="adaptive")
except weft.Unsupported as error:
    refused = str(error)
if rank == 0:
    calls = weft.fabric.of(None).num_calls
    print(json.dumps([said.fabric, said.asked, said.schedule, str(said), refused, calls]))
dist.destroy_process_group()
"""


def start(command: list[str], *plugins: Path, **environment: str) -> str:
    """The output of a command that knows these files."""
    env = {**os.environ, "WEFT_PLUGINS": ",".join(map(str, plugins)), **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_an_operator_a_schedule_and_a_fabric_are_measured_by_weft_run():
    command = [sys.executable, "-m", "weft", "run", "sum_rows", "--m", "64", "--n", "64"]
    command += ["--schedule", "serial,thirds,hetero-unfused-1d@cores", "--link", "memory"]
    text = start([*command, "--repeat", "2", "--json"], OPERATOR, SCHEDULE, FABRIC)
    found = json.loads(text)
    assert found["operation"] == "sum_rows of 64x32 float32 on 2 ranks"
    names = {arm["name"] for arm in found["schedules"]}
    assert names == {"serial@dma", "thirds@dma", "hetero-unfused-1d@cores"}
    assert all(arm["bytes"].values() for arm in found["schedules"])


def test_they_are_explained(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    text = start(command, OPERATOR, SCHEDULE, FABRIC, WEFT_FABRIC="counted")
    fabric, asked, schedule, said, refused, calls = json.loads(text)
    assert (fabric, asked, schedule) == ("counted", "thirds@dma", "thirds@dma")
    assert "sum_rows of 7x3 float32 on 2 ranks" in said
    assert "fabric     counted" in said
    assert "adaptive@dma cannot be planned: chunks of rows are added one by one" in refused
    assert calls >= 3


def test_a_machine_a_schedule_and_an_operator_are_explored(tmp_path):
    own = Path(weft.machine.__file__).with_name("h100.toml").read_text()
    machine = tmp_path / "half.toml"
    rate = re.compile(r"(\[compute\.rate\][^\[]*?\nbfloat16 = )(\S+)")
    machine.write_text(rate.sub(lambda found: f"{found[1]}{float(found[2]) / 2}", own))
    command = [sys.executable, "-m", "weft", "explore", "--machine", str(machine)]
    shape = ["--m", "4096", "--n", "4096", "--k", "4096", "--schedule", "serial,thirds", "--json"]
    found = json.loads(start([*command, *shape], SCHEDULE))
    text = json.dumps(found)
    assert "thirds@dma" in text
    assert found["scenarios"][0]["compute_ms"] > 0.04, "half the rate takes twice as long"
    other = json.loads(start([*command, "--op", "sum_rows", *shape], OPERATOR, SCHEDULE))
    names = [arm["name"] for arm in other["scenarios"][0]["schedules"]]
    assert names == ["serial@dma", "thirds@dma"]
    assert other["scenarios"][0]["compute_ms"] < 0.5 * found["scenarios"][0]["compute_ms"]


def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch):
    env = {**os.environ, "WEFT_PLUGINS": "nowhere.py"}
    command = [sys.executable, "-c", "import weft"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode != 0
    assert "the weft plugin nowhere.py cannot be imported" in done.stderr
    assert "FileNotFoundError" in done.stderr
    monkeypatch.setenv("WEFT_PLUGINS", "no_such_module")
    with pytest.raises(weft.Unsupported, match=r"weft plugin no_such_module .*No module named"):
        weft.plugins.load()


def test_a_name_of_a_schedule_is_taken_once():
    from weft.schedule import Schedule, register

    with pytest.raises(weft.Unsupported, match="another schedule 'adaptive'"):
        register("adaptive", Schedule(depth=3))
    with pytest.raises(weft.Unsupported, match="cannot be the name"):
        register("Thirds!", Schedule(depth=3))
