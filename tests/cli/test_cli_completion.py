"""`weft completion` and `weft --version`, which a shell asks often."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from weft.cli import app, find_commands
from weft.cli.completion import script, tree_of
from weft.errors import Unsupported


@pytest.fixture(scope="module")
def tree():
    find_commands()
    return tree_of(typer.main.get_command(app))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ma"], ["machine"]),
        (["machine", "ch"], ["check"]),
        (["explore", "--m", "3", "--machi"], ["--machine"]),
        (["machine", "list", "--j"], ["--json"]),
        (["explore", "nothing-like-this"], []),
    ],
)
def test_bash_completes(tree, words, found):
    asked = " ".join(f"'{word}'" for word in ["weft", *words])
    code = f"{script('bash', tree)}\nCOMP_WORDS=({asked}); COMP_CWORD={len(words)}; _weft\n"
    done = subprocess.run(
        ["bash", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == found


def test_the_other_shells_know_every_command_too(tree):
    assert script("zsh", tree).endswith(script("bash", tree))
    fish = script("fish", tree)
    for path, after in tree.items():
        for name, _ in after:
            word = f"-l {name[2:]} " if name.startswith("--") else f"-a {name} "
            assert word in fish, (path, name)


def test_another_shell_is_refused(tree):
    with pytest.raises(Unsupported, match="did you mean fish"):
        script("fihs", tree)


def test_the_version_is_told_without_torch():
    code = (
        "import resource, sys; from weft_command import main\n"
        "sys.argv[1:] = ['--version']; main()\n"
        "assert 'torch' not in sys.modules and 'weft' not in sys.modules\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, seconds = done.stdout.splitlines()
    assert version.startswith("weft ")
    assert float(seconds) < 0.5
