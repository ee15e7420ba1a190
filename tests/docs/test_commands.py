"""Commands of the how-to pages about machines, prices and models run as they are printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from weft.cli import main

ROOT = Path(__file__).parents[2]
PAGES = ("machines", "price", "layers")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
"""The `config.json` of the pages: a small one, for speed."""


def commands(page: str) -> list[list[str]]:
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    lines = [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, flags=re.S)
        for line in block.splitlines()
    ]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("weft ")]


@pytest.mark.parametrize("page", PAGES)
def test_commands_run_as_printed(page: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("*.py"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = commands(page)
    assert len(found) >= 4
    for command in found:
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        streams = capsys.readouterr()
        assert ended.value.code == 0, (command, streams.err)
        assert streams.out.strip(), command


def test_the_files_of_the_page_are_machines(tmp_path: Path) -> None:
    from weft.machine import load

    text = (ROOT / "docs" / "how-to" / "machines.md").read_text()
    found = {}
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", text, flags=re.S)):
        (tmp_path / f"{number}.toml").write_text(block)
        machine = load(tmp_path / f"{number}.toml")
        found[machine.title] = machine.links.world
    assert found == {
        "8 x H100 NVL, 94 GB": 8,
        "2 x Xeon 6980P, DDR5-6400, a rank per NUMA node": 6,
    }
