"""The command line as a user calls it, by `weft.cli.main`: exit code and both streams."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from weft.cli import main
from weft.cli.console import WIDTH, console


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as without a terminal, whatever COLUMNS says here."""
    monkeypatch.setattr(console, "width", WIDTH)


@pytest.fixture
def weft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """`weft("explore", "--m", "64")` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["weft", *arguments])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        streams = capsys.readouterr()
        return Done(code, streams.out, streams.err)

    return run


@pytest.fixture
def refused(weft: Callable[..., Done], tmp_path: Path) -> Callable[..., str]:
    """The one sentence with which a command refuses bad input: code 2, nothing else said, and
    nothing written."""

    def run(*arguments: str) -> str:
        before = sorted(path.name for path in tmp_path.iterdir())
        done = weft(*arguments)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("weft: ")
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return line.removeprefix("weft: ")

    return run


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setattr(console, "width", 80)
