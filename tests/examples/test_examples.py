"""The examples run as torchrun would start them, small, and say what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "transformer": ["--steps", "4", "--sequence", "16", "--size", "16"],
    "moe": ["--tokens", "64", "--size", "16"],
    "fsdp2": ["--steps", "4", "--size", "32", "--layers", "2"],
    "decode": ["--tokens", "4", "--size", "32", "--layers", "1", "--int8"],
    "recover": ["--steps", "8", "--fail-at", "6", "--size", "8"],
    "train": ["--steps", "4", "--size", "32", "--layers", "1", "--sequence", "16"],
    "dlrm": ["--steps", "3", "--batch", "32", "--rows", "50", "--dim", "8", "--tables", "4"],
}
IN_BACKGROUND = ["--asynchronous", "--backend", "weft"]


@pytest.fixture
def run(ranks):
    """`run("moe")`: what the first of two ranks prints. One pair of ranks runs all scripts, for
    importing torch takes longer than any. Without the guard, `auto` chooses by its rules alone,
    also on a busy machine."""
    pool = ranks(2, WEFT_TESTS="examples", WEFT_GUARD="0")
    return lambda name: pool.run(
        run_script, (EXAMPLES / f"{name}.py").read_text(), f"{name}.py", SMALL[name]
    )[0]


def test_transformer_under_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / "transformer.py"), *SMALL["transformer"]],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"torch  loss .*\nweft   loss ", done.stdout)
    assert float(re.search(r"largest difference of a loss: (\S+)", done.stdout)[1]) <= 1e-5


def recovered(output: str, world: int) -> None:
    """That training went on after the kill, with the losses of one without it."""
    found = re.search(r"(\d) ranks go on from step 4; .* (\S+) s after the kill", output)
    assert found, output
    assert int(found[1]) == world
    assert float(re.search(r"nothing failed: (\S+)", output)[1]) <= 1e-5


def test_survivors_go_on_in_process():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "recover.py"), *SMALL["recover"]],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    recovered(done.stdout, 2)
    assert done.stdout.count("rank 1 died") == 2


def test_all_ranks_start_again_under_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    kept = ["--checkpoint", str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", str(EXAMPLES / "recover.py"), *SMALL["recover"], *kept],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    recovered(done.stdout, 2)


def test_moe(run):
    output = run("moe")
    sent = re.search(r"each expert: \[\[(\d+), (\d+)\]", output)
    assert int(sent[1]) != int(sent[2])  # the routing is uneven
    assert "results and gradients equal" in output


@pytest.mark.parametrize("more", [[], IN_BACKGROUND], ids=["at once, gloo", "in background, weft"])
def test_train(ranks, tmp_path, more):
    script = (EXAMPLES / "train.py").read_text()
    options = [*SMALL["train"], "--checkpoint", str(tmp_path), *more]
    pool = ranks(4, WEFT_TESTS="examples")
    assert "equals the first one bit by bit" in pool.run(run_script, script, "train.py", options)[0]
    if not more:
        again = pool.run(run_script, script, "train.py", options)[0]
        assert "resumed from step 2" in again


def test_decode(run):
    output = run("decode")
    assert "both decode [1, " in output
    assert "schedule   in-kernel@direct" in output
    assert re.search(r"weft, int8  \d+ tokens/s", output)


def test_dlrm(run):
    output = run("dlrm")
    assert re.search(r"plain .*\nfused ", output)
    assert "both ways have the same losses" in output


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_tested(path):
    assert path.stem in SMALL or path.stem in ("serve", "serve_ranks")  # test_serve.py


def test_fsdp2(run):
    output = run("fsdp2")
    assert re.search(r"gloo  loss .*\nweft  loss ", output)
    assert float(re.search(r"largest difference of a loss: (\S+)", output)[1]) <= 1e-6
