"""How a command ends: with one sentence and no traceback, whatever it was given, wherever its
output goes, and whenever it is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

WEFT = Path(sys.executable).with_name("weft")
SHAPE = ("--m", "1024", "--n", "1024", "--k", "512", "--schedule", "serial")
ODD = "a [/x] [bold]b :smile: \x1b[2J"
SHOWN = r"a [/x] [bold]b :smile: \x1b[2J"


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [str(WEFT), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_names_are_shown_as_they_are(weft: Callable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "_name_or_path": f"{ODD}\ud800",
                **{"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8},
                "intermediate_size": 1024,
            }
        )
    )
    done = weft("explore", "--layers", "config.json")
    assert done.returncode == 0, done.stderr
    assert " ".join((SHOWN + r"\ud800").split()) in " ".join(done.stdout.split())
    (tmp_path / "shapes.csv").write_text(f"id,m,n,k\n{ODD},1024,1024,512\nb,512,512,512\n")
    done = weft("explore", "--shapes", "shapes.csv", "--schedule", "serial")
    assert done.returncode == 0, done.stderr
    assert "[/x]" in done.stdout
    assert "\x1b" not in done.stdout
    text = json.dumps("[/bold] :smile: mine")
    (tmp_path / "mine.toml").write_text(f'base = "h100"\ntitle = {text}\n')
    done = weft("explore", "--machine", "mine.toml", *SHAPE)
    assert done.returncode == 0, done.stderr
    assert "[/bold] :smile: mine" in done.stdout


def test_names_are_shown_as_they_are_beside_a_progress_bar(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "h100"\nname = "[/bold] mine"\n')
    ours, theirs = os.openpty()
    command = [str(WEFT), "explore", "--machine", "mine.toml", *SHAPE]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(timeout=120) == 0, shown
    assert b"[/bold] mine" in shown


def test_what_typer_finds_wrong_is_json_too(weft: Callable) -> None:
    done = weft("explore", "--m", "many", "--json")
    assert done.returncode == 2
    assert "'--m'" in json.loads(done.stdout)["error"]
    assert "'--m'" in done.stderr


def test_an_interrupted_command_says_that_it_was_stopped(
    weft: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr("weft.cli.explore.simulate", interrupt)
        done = weft("explore", *SHAPE, "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 130
    assert json.loads(done.stdout) == {"error": "stopped"}
    assert done.stderr.strip() == "weft: stopped"


def interrupt(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_while_the_command_starts(tmp_path: Path) -> None:
    """In place of a module that weft imports is one that interrupts its own import."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError('not reached')\n"
    )
    process = start(
        "machine", "list",
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.communicate(timeout=120)[1] == "weft: stopped\n"
    assert process.returncode == 130


def test_a_plugin_that_cannot_be_imported() -> None:
    process = start(
        "machine", "list", "--json",
        stdout=subprocess.PIPE,
        env=os.environ | {"WEFT_PLUGINS": "not_there_at_all"},
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "not_there_at_all" in json.loads(out)["error"]
    assert err.count("\n") == 1
    assert err.startswith("weft: the weft plugin not_there_at_all cannot be imported")


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "raise SystemExit('a\\nb')"])
def test_a_plugin_that_ends_python(line: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(line)
    process = start(
        "machine", "list", "--json",
        stdout=subprocess.PIPE,
        env=os.environ | {"WEFT_PLUGINS": str(tmp_path / "ends.py")},
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "cannot be imported (SystemExit" in json.loads(out)["error"]
    assert err.count("\n") == 1


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))


def test_too_few_files_for_ranks() -> None:
    shape = ("--m", "64", "--n", "64", "--k", "64", "--repeat", "1", "--world", "8")
    process = start(
        "run", "all_gather_matmul", *shape, "--json", preexec_fn=few_files, stdout=subprocess.PIPE
    )
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2, err
    assert "Too many open files" in json.loads(out)["error"]
    assert err.count("\n") == 1


def test_targets_that_are_no_files(refused: Callable, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "link.html").symlink_to("nothing/there.html")
    for name in ("pipe.html", "link.html", "/dev/null"):
        assert "a device, a pipe or a broken link" in refused("explore", *SHAPE, "--html", name)


def test_a_link_to_a_file_stays_one(weft: Callable, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to("page.html")
    assert weft("explore", *SHAPE, "--html", "link.html").returncode == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "<html" in (tmp_path / "page.html").read_text()


def test_paces_beyond_all_links(refused: Callable, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    assert "2GB/s or 500MB/s" in refused("loom", "check", "s.py", "--pace", "1e400")
    shape = ("--m", "64", "--n", "64", "--k", "64")
    assert "at least 1 kB/s" in refused("tune", "all_gather_matmul", *shape, "--link", "1e-30GB/s")


def test_an_output_that_is_full() -> None:
    with open("/dev/full", "w") as full:
        process = start("machine", "list", stdout=full)
        err = process.communicate(timeout=120)[1]
    assert err == "weft: the output cannot be written: No space left on device\n"
    assert process.returncode == 2


def test_an_output_that_is_closed() -> None:
    process = start("machine", "list", preexec_fn=lambda: os.close(1))
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize("as_json", [True, False])
def test_a_reader_that_has_gone(as_json: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start("machine", "list", *["--json"] * as_json, stdout=write)
    os.close(write)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [("machine", "check"), ("explore", "--layers"), ("explore", "--shapes")],
    ids=["toml", "json", "csv"],
)
def test_a_file_without_end(arguments: tuple[str, ...], refused: Callable, tmp_path: Path) -> None:
    name = "endless.json" if "--layers" in arguments else "/dev/zero"
    if name != "/dev/zero":
        os.symlink("/dev/zero", tmp_path / name)
    assert "is longer than 64 MiB" in refused(*arguments, name)


def test_a_long_chain_of_bases(refused: Callable, tmp_path: Path) -> None:
    for number in range(1200):
        base = "h100" if number == 1199 else f"m{number + 1}.toml"
        (tmp_path / f"m{number}.toml").write_text(f'base = "{base}"\n')
    assert "at most 16 files below it" in refused("machine", "check", "m0.toml")


def test_one_file_for_two_outputs(refused: Callable) -> None:
    assert "twice" in refused("explore", *SHAPE, "--html", "a.out", "--trace", "./a.out")


def test_a_target_that_cannot_be_is_refused_before_the_work(refused: Callable) -> None:
    assert "no folder" in refused("demo", "--html", "nowhere/a.html")
    assert "no folder" in refused("demo", "--svg", "nowhere/a.svg")
    assert "no folder" in refused("calibrate", "--output", "nowhere/a.toml")
