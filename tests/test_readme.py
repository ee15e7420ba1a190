"""The README tells the truth: its example runs as printed, and the commands it names exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_under_torchrun(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    script = tmp_path / "overlapped.py"
    script.write_text(code)
    gains = []
    while len(gains) < 3 and max(gains, default=0.0) <= 1.0:  # another job may take the cores
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        (gain,) = re.findall(r"serial \d+\.\d ms, auto \d+\.\d ms: (\d+\.\d\d)x", done.stdout)
        gains.append(float(gain))
        assert done.stdout.count("all_gather_matmul") == 1, "only rank 0 prints"
    assert max(gains) > 1.0, gains


def test_the_figures_are_those_of_the_last_benchmarks():
    from generate import benchmarks as page
    from weft import benchmarks

    made = page.documents(ROOT / "docs", benchmarks.names())
    assert made["../README.md"] == README, "run: python docs/generate/benchmarks.py"
    assert made["benchmarks.md"] == (ROOT / "docs/benchmarks.md").read_text()
    table = README.split(page.BEGIN)[1].split(page.END)[0].strip().splitlines()
    assert len(table) == 2 + len(page.FIGURES) == 8


def test_every_command_named_is_there(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["weft", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    for command in set(re.findall(r"`weft ([a-z0-9]+)", README)):
        assert re.search(rf"^  {command}\b", listed, flags=re.M), command


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
