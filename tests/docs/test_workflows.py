"""The workflows of continuous integration: they parse, end in time, use actions by their commit,
and run only what is there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml  # comes with transformers

from weft.cli import main

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}


def jobs(name: str) -> dict[str, dict]:
    return yaml.safe_load(WORKFLOWS[name].read_text())["jobs"]


def commands(name: str) -> list[str]:
    """What its steps run, line by line, with every value of a job's matrix put in."""
    found = []
    for job in jobs(name).values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job.get("steps", []):
            lines = step.get("run", "").splitlines()
            for key, values in matrix.items():
                place = f"${{{{ matrix.{key} }}}}"
                lines = [
                    line.replace(place, str(value))
                    for line in lines
                    for value in (values if place in line else [""])
                ]
            found += lines
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))


def test_the_workflows_are_there():
    assert {"test.yml", "sanitize.yml", "nightly.yml"} <= set(WORKFLOWS)
    assert ".ci/run" in commands("test.yml")
    assert "make sanitize" in commands("sanitize.yml")
    assert {f"make {t}" for t in ("fuzz", "chaos", "conformance", "odr")} <= set(
        commands("nightly.yml")
    )


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_bounded_and_pinned(name):
    for job in jobs(name).values():
        assert job["timeout-minutes"] > 0
        for step in job.get("steps", []):
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_runs_is_there(name, monkeypatch, capsys):
    for line in commands(name):
        program, *rest = shlex.split(line) or [""]
        if program == "make":
            assert {word for word in rest if "=" not in word} <= targets(), line
        elif program.startswith(".ci/"):
            assert (ROOT / program).exists(), line
        elif Path(program).name == "weft":
            monkeypatch.setattr(sys, "argv", ["weft", rest[0], "--help"])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 0, line
            known = capsys.readouterr().out
            assert all(word in known for word in rest if word.startswith("--")), line
