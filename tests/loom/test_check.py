"""`weft loom check`: a user's script on several ranks, what is reported, and the exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

# ranks exchange a buffer: rank 0 writes it, rank 1 reads it and adds one.
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm

dist.init_process_group("gloo")
rank, left_out = dist.get_rank(), sys.argv[1:]
x = symm.empty(256, device="loom")
handle = symm.rendezvous(x, dist.group.WORLD)
side = torch.Stream("loom")
x.fill_(rank)
handle.barrier()
if "wait" not in left_out:
    side.wait_stream(torch.accelerator.current_stream())
with side:
    y = handle.get_buffer(1 - rank, (256,), torch.float32) + 1
torch.accelerator.current_stream().wait_stream(side)
if "fail" in left_out:
    raise SystemExit("the script has a bug")
if "touch" in left_out and rank == 1:
    import ctypes
    ctypes.string_at(x.data_ptr(), 4)
handle.barrier()
x.fill_(-1)
assert y[0].item() == 2 - rank
print("rank", rank, "is through")
dist.barrier()
dist.destroy_process_group()
"""

# Each rank waits on one stream for a word that the other posts on another stream, issued later.
CROSSED = """
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm
from weft.loom.driver import LoomDriver

dist.init_process_group("gloo")
rank, driver = dist.get_rank(), LoomDriver()
words = symm.empty(4, dtype=torch.int32, device="loom")
handle = symm.rendezvous(words, dist.group.WORLD)
words.zero_()
torch.accelerator.synchronize()
dist.barrier()
a, b = torch.Stream("loom"), torch.Stream("loom")
driver.wait(words.data_ptr(), 1, a)
driver.post(handle.buffer_ptrs[1 - rank], 1, b)
torch.accelerator.synchronize()
"""


def check(tmp_path, code, *options, arguments=(), world=2):
    """The exit code, what --json prints, and the script's path."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = weft_command("check", "--world", str(world), "--json", *options, str(script), *arguments)
    assert done.stdout.startswith("{"), done.output
    return done.exit_code, json.loads(done.stdout), script


def weft_command(*arguments):
    from weft.cli import app, find_commands

    find_commands()
    return CliRunner().invoke(app, ["loom", *arguments])


def test_a_correct_script_gives_nothing(tmp_path):
    code, found, _ = check(tmp_path, SCRIPT, "--queues", "2")
    assert (code, found["findings"], found["failed"]) == (0, [], "")
    assert found["ranks"] == [{"rank": 0, "exit": 0}, {"rank": 1, "exit": 0}]


def test_a_race_names_both_sides_and_their_lines(tmp_path):
    code, found, script = check(tmp_path, SCRIPT, arguments=["wait"])
    assert code == 1
    race = found["findings"][0]
    assert race["kind"] == "race"
    assert race["ranks"] == [0, 1]
    assert {o["name"] for o in race["operations"]} == {"add", "fill"}
    assert len(race["streams"]) == 2
    assert f"{script}:11" in race["lines"]
    assert f"{script}:16" in race["lines"]


def test_a_script_that_fails_is_told_apart(tmp_path):
    code, found, _ = check(tmp_path, SCRIPT, arguments=["fail"])
    assert (code, found["findings"]) == (2, [])
    assert "the script has a bug" in found["failed"]


def test_a_touch_by_the_host_names_its_line(tmp_path):
    code, found, script = check(tmp_path, SCRIPT, arguments=["touch"])
    assert code == 1
    touch = next(f for f in found["findings"] if f["kind"] == "touch")
    assert touch["ranks"] == [1]
    assert touch["lines"] == [f"{script}:22"]


def test_a_deadlock_by_aliasing_is_found_on_one_queue_only(tmp_path):
    code, found, script = check(tmp_path, CROSSED)
    assert (code, found["findings"]) == (0, [])
    code, found, script = check(tmp_path, CROSSED, "--queues", "1")
    assert code == 1
    assert {f["kind"] for f in found["findings"]} == {"aliasing"}
    assert found["findings"][0]["lines"] == [f"{script}:14", f"{script}:15"]


def test_the_command_ends_with_a_verdict_and_the_page_tells_the_truth(tmp_path):
    """The script of docs/loom.md, as it is, and without its second wait."""
    page = (Path(__file__).parents[2] / "docs" / "loom.md").read_text()
    code = re.search(r"```py\n(# gather.py\n.*?)```", page, flags=re.S)[1]
    script = tmp_path / "gather.py"
    script.write_text(code)
    command = [sys.executable, "-m", "weft", "loom", "check", "--world", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0.0", "1 0.0", "Nothing was found on 2 ranks."]
    join = "torch.accelerator.current_stream().wait_stream(copies)\n"
    assert join in code
    exit_code, found, _ = check(tmp_path, code.replace(join, ""))
    assert exit_code == 1
    assert {o["name"] for o in found["findings"][0]["operations"]} == {"mm", "copy"}


def test_bad_input_is_one_sentence(tmp_path):
    done = weft_command("check", str(tmp_path / "no.py"))
    assert "there is no script" in done.output
    assert done.exit_code == 2
    done = weft_command("check", "--mode", "lat", str(tmp_path))
    assert "did you mean late?" in done.output
    done = weft_command("check", "--queues", "3", str(tmp_path))
    assert "1, 2 or 4" in done.output
