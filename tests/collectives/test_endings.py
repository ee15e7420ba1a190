"""A script ends with its own exit code and without a word, whatever is under way when it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_every_ending_of_a_script(tmp_path):
    script = Path(__file__).with_name("endings.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    assert len(codes) == 5
    assert {ending: code for ending, code in codes.items() if code != [0, 3]} == {}, done.stderr
    assert done.stderr == ""
