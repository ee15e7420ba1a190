"""torch's generic device tests (torch.testing's operator database and PrivateUse1 test base)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_torchs_generic_device_tests_pass(library):
    """Creation, views, copies, indexing, arithmetic and autograd of 117 operators."""
    script = Path(__file__).with_name("generic_device.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [], done.stderr[-2000:]
    assert found["run"] > 500
    assert found["samples"] > 2500
    assert found["gradients"] > 500
