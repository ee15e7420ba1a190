"""The examples run under torchrun, small, and say what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "transformer": ["--steps", "4", "--sequence", "16", "--size", "16"],
    "moe": ["--tokens", "64", "--size", "16"],
    "fsdp2": ["--steps", "4", "--size", "32", "--layers", "2"],
    "decode": ["--tokens", "4", "--size", "32", "--layers", "1", "--int8"],
    "dlrm": ["--steps", "3", "--batch", "32", "--rows", "50", "--dim", "8", "--tables", "4"],
}


def run(name):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / f"{name}.py"), *SMALL[name]],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformer():
    output = run("transformer")
    assert re.search(r"torch  loss .*\nweft   loss ", output)
    assert float(re.search(r"largest difference of a loss: (\S+)", output)[1]) <= 1e-5


def test_moe():
    output = run("moe")
    sent = re.search(r"each expert: \[\[(\d+), (\d+)\]", output)
    assert int(sent[1]) != int(sent[2])  # the routing is uneven
    assert "results and gradients equal" in output


def test_decode():
    output = run("decode")
    assert "both decode [1, " in output
    assert "schedule   fused@direct" in output
    assert re.search(r"weft, int8  \d+ tokens/s", output)


def test_dlrm():
    output = run("dlrm")
    assert re.search(r"plain .*\nfused ", output)
    assert "both ways have the same losses" in output


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_tested(path):
    assert path.stem in SMALL


def test_fsdp2():
    output = run("fsdp2")
    assert re.search(r"gloo  loss .*\nweft  loss ", output)
    assert float(re.search(r"largest difference of a loss: (\S+)", output)[1]) <= 1e-6
