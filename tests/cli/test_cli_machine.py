"""`weft machine`: a list, files to begin from, and checks that explain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from weft.machine import all_names, load


def test_the_list(weft, narrow) -> None:
    done = weft("machine", "list")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    first = [line.split()[0] for line in lines if line.strip()]
    assert [word for word in first if word in all_names()] == all_names()
    found = json.loads(weft("machine", "list", "--json").stdout)
    assert [one["name"] for one in found] == all_names()


def test_a_new_file_can_be_checked_and_used(weft, tmp_path: Path) -> None:
    done = weft("machine", "new", "--from", "mi300x")
    assert done.returncode == 0, done.stderr
    assert "weft machine check my-mi300x.toml" in " ".join(done.stdout.split())
    assert load(tmp_path / "my-mi300x.toml").compute == load("mi300x").compute
    done = weft("machine", "check", "my-mi300x.toml")
    assert done.returncode == 0
    assert "nothing looks implausible" in " ".join(done.stdout.split())
    done = weft(
        "price", "gemm", "--m", "64", "--n", "64", "--k", "64", "--machine", "my-mi300x.toml"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(weft("machine", "new", "other.toml", "--json").stdout)
    assert found == {"file": "other.toml", "from": "h100"}


def test_a_check_lists_what_is_wrong(weft, tmp_path: Path) -> None:
    weft("machine", "new", "mine.toml")
    text = (tmp_path / "mine.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("units = 132", "unts = 132"))
    done = weft("machine", "check", "mine.toml")
    assert done.returncode == 2
    assert "wrong: compute.unts is no key that weft knows (did you mean units?)." in done.stdout
    assert "wrong: compute.units is missing." in done.stdout
    assert "cannot be used until these 2 are put right" in done.stdout
    found = json.loads(weft("machine", "check", "mine.toml", "--json").stdout)
    assert not found["ok"]
    assert [one["key"] for one in found["errors"]] == ["compute.unts", "compute.units"]
    (tmp_path / "mine.toml").write_text(text.replace("host = 5e-6", "host = 5"))
    done = weft("machine", "check", "mine.toml")
    assert done.returncode == 0
    assert "doubtful: launch.host is 5;" in done.stdout
    assert "one number of it should be looked at again" in done.stdout.replace("\n", " ")


def test_a_cluster_is_checked_too(weft, tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text(
        'machine = "h100"\nnodes = 4\n[nics]\ncount = 8\nbandwidth = 5e10\n'
        '[network]\ntopology = "switch"\n'
    )
    done = weft("machine", "check", "few.toml")
    assert "a cluster of 4 x 8 devices that can be used" in done.stdout
    assert json.loads(weft("machine", "check", "few.toml", "--json").stdout)["ok"]


def test_bad_calls(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "there.toml").write_text("")
    for arguments, words in (
        (("new", "--from", "h10"), "did you mean h100"),
        (("new", "there.toml"), "is there already"),
        (("new", "mine.txt"), "ends in .toml"),
        (("new", "nowhere/mine.toml"), "there is no folder"),
        (("check", "none.toml"), "none.toml cannot be read"),
    ):
        assert words in refused("machine", *arguments)
    (tmp_path / "broken.toml").write_text("units = = 3")
    assert "is not a TOML file" in refused("machine", "check", "broken.toml")
