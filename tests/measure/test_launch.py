"""`weft.launch`: functions of any program on new ranks; results, output, errors and interrupts."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist

import weft
from weft.loom.build import why_not
from weft.measure import rank_processes

PROGRAM = """
import torch, torch.distributed as dist, weft
factor = 3.0
class Found:
    def __init__(self, y): self.y = y
def work(n, *, failing):
    print("here is", dist.get_rank())
    print("no newline", end="")
    if dist.get_rank() == failing:
        raise ValueError("that is bad")
    return Found(weft.all_gather_matmul(torch.full((2, 4), factor), torch.ones(4, n)))
found = weft.launch(work, 5, world=2, failing=None)
assert all(isinstance(one, Found) and torch.equal(one.y, torch.full((4, 5), 12.0)) for one in found)
try:
    weft.launch(work, 5, world=2, failing=1)
except weft.RankFailed as error:
    print("caught", error)
"""


def test_functions_of_a_program_from_standard_input():
    done = subprocess.run(
        [sys.executable, "-"], input=PROGRAM, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        assert lines.count(f"[rank {rank}] here is {rank}") == 2
        assert f"[rank {rank}] no newline" in lines
    assert "caught rank 1 raised ValueError: that is bad" in lines
    assert "in work" in done.stdout  # the traceback of the rank


def _own_result(kind):
    assert os.environ["RANK"] == str(dist.get_rank())
    if kind == "view":
        return torch.arange(1 << 22)[:2].requires_grad_(False), torch.ones(2, requires_grad=True)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "lock":
        return threading.Lock()
    if kind == "refused":
        weft.all_gather_matmul(torch.ones(2, 3), torch.ones(4, 4))
    if kind == "loom":
        return torch.ones(2, device="loom") + 1
    return dist.get_backend()


def test_only_the_elements_of_a_tensor_are_sent():
    ((view, leaf),) = weft.launch(_own_result, "view", world=1)
    assert view.tolist() == [0, 1]
    assert view.untyped_storage().nbytes() == 16
    assert leaf.requires_grad


def test_a_group_of_the_backend_weft():
    assert weft.launch(_own_result, "backend", world=1, backend="weft") == ["weft"]


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("dies", weft.Error, "^rank 0 ended by signal SIGKILL, without an error message$"),
        ("lock", weft.Unsupported, "^rank 0: the result of the function cannot be sent back"),
        ("refused", weft.Unsupported, "^rank 0: w has 4 rows"),
    ],
)
def test_errors_name_the_rank(kind, error, words):
    with pytest.raises(error, match=words):
        weft.launch(_own_result, kind, world=1)


@pytest.mark.skipif(why_not() != "", reason=why_not())
class _Unreadable(weft.Error):
    def __init__(self, one, two):
        super().__init__(one)


def _odd_end(kind):
    if dist.get_rank() == 1:
        if kind == "forks" and os.fork() == 0:
            time.sleep(600)
        if kind == "raises":
            raise _Unreadable("one", "two")
        if kind == "half":
            os.write(_pipe_of_this_rank(), struct.pack("!i", 1000) + b"only some")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _pipe_of_this_rank():
    return next(
        frame.f_locals["pipe"].fileno()
        for frame, _ in traceback.walk_stack(None)
        if frame.f_code.co_name == "main" and "pipe" in frame.f_locals
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("forks", "^rank 1 ended by signal SIGKILL, without an error message$"),
        ("half", "^rank 1 ended by signal SIGKILL, without an error message$"),
        ("raises", "^what rank 1 returned or raised cannot be read here "),
    ],
)
def test_odd_ends_of_a_rank(kind, words):
    """A rank that leaves a child behind, that dies while it answers, and that raises an error which
    cannot be sent."""
    with pytest.raises(weft.Error, match=words):
        weft.launch(_odd_end, kind, world=2)


class _Late:
    """An argument that keeps rank 1 from joining the group, and says when it does."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return _be_late, (self.path,)


def _be_late(path):
    if os.environ["RANK"] == "1":
        path.touch()
        time.sleep(600)


def test_a_rank_that_does_not_join_is_named_and_says_what_it_does(monkeypatch, tmp_path, capsys):
    here = tmp_path / "here"

    def give_up():
        while not here.exists():
            time.sleep(0.05)
        monkeypatch.setattr(rank_processes, "_JOIN", 0.0)

    waiting = threading.Thread(target=give_up, daemon=True)
    waiting.start()
    with pytest.raises(weft.Error, match=r"1 did not join the group within 0 s"):
        weft.launch(_own_result, _Late(here), world=2)
    waiting.join()
    said = capsys.readouterr().err.splitlines()
    assert any(line.startswith("[rank 1]") and "in _be_late" in line for line in said)


def test_tensors_of_a_device_come_back_on_the_cpu():
    (made,) = weft.launch(_own_result, "loom", world=1, device="loom")
    assert made.device.type == "cpu"
    assert made.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"world": 0}, "world must be a whole number"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"threads": True}, "threads must be a whole number"),
        ({"threads": 1025}, "threads must be at most 1024, not 1025"),
        ({"threads": 10**30}, "threads must be at most 1024"),
        ({"backend": "glo"}, r"backend must be gloo or weft, not 'glo' \(did you mean gloo\?\)"),
        ({"device": "tpu"}, "device must be cpu or loom or cuda"),
        ({"device": "loom", "backend": "weft"}, "the backend weft is for CPU tensors"),
    ],
)
def test_arguments_are_checked_before_anything_starts(given, words):
    with pytest.raises(weft.Unsupported, match=words):
        weft.launch(_own_result, "none", **given)


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(weft.Unsupported, match=r"cannot be sent to the ranks .*lock"):
        weft.launch(lambda: lock)


WAITING = """
import os, time, weft
def work():
    print("pid", os.getpid())
    time.sleep(600)
try:
    weft.launch(work, world=2)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_an_interrupt_ends_all_ranks():
    program = subprocess.Popen(
        [sys.executable, "-u", "-c", WAITING],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        pids = [int(program.stdout.readline().split()[-1]) for _ in range(2)]
        program.send_signal(signal.SIGINT)
        assert program.stdout.read() == "stopped\n"
        assert program.wait(60) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    finally:
        program.kill()
        program.wait()
