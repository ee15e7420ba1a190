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
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([1024, 2048])") == 2
    assert done.stdout.count("adaptive@direct") == 2
    assert len(re.findall(r"rank [01] waited \d+\.\d+ ms for bytes", done.stdout)) == 2


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
