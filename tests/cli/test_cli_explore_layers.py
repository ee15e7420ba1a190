"""`weft explore --layers`, and several machines side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "layers.toml")
SHAPE = ("--m", "4096", "--n", "4096", "--k", "2048")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return "config.json"


def test_a_list_of_layers_fits_80_columns(weft, narrow) -> None:
    done = weft("explore", "--layers", EXAMPLE, "--machine", "mi300x,h100")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert "…" not in done.stdout
    for name in ("QKV", "attention", "projection", "gate and up", "down", "vocabulary"):
        assert sum(line.strip().startswith(name + " ") for line in lines) == 2
    assert "a step takes" in done.stdout
    assert "is the quickest" in done.stdout


def test_a_config_as_data(weft, config: str) -> None:
    arguments = ("--layers", config, "--batch", "4", "--sequence", "1024", "--json")
    found = json.loads(weft("explore", *arguments, "--machine", "h100").stdout)
    assert found["model"].startswith("llama, forward, 4 x 1024 tokens, sequence parallel")
    assert [layer["name"] for layer in found["layers"]] == [
        *("QKV", "attention", "projection", "gate and up", "down", "vocabulary")
    ]
    for name in ("serial", "overlapped", "auto", "ideal"):
        total = sum(layer["count"] * layer[f"{name}_ms"] for layer in found["layers"])
        assert found[f"{name}_ms"] == pytest.approx(total)
    assert found["saves_ms"] == pytest.approx(
        sum(layer["saves_in_all_ms"] for layer in found["layers"])
    )
    assert found["assumptions"]
    train = json.loads(
        weft("explore", *arguments, "--step", "train", "--schedule", "serial").stdout
    )
    assert len(train["layers"]) == 6 + 5 * 2 + 1


def test_shapes_on_two_machines(weft, narrow, tmp_path: Path) -> None:
    done = weft("explore", *SHAPE, "--machine", "mi300x,h100")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert sum("@" in line and line.strip().endswith("x") for line in lines) == 21
    assert "is the quickest" in done.stdout
    (tmp_path / "mine.csv").write_text("id,m,n,k\na,4096,4096,1024\nb,8192,4096,512\n")
    arguments = ("--shapes", "mine.csv", "--machine", "h100,b200", "--schedule", "serial,adaptive")
    done = weft("explore", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(weft("explore", *arguments, "--json").stdout)
    assert [one["machine"] for one in found["machines"]] == ["h100", "b200"]
    assert all(len(one["scenarios"]) == 2 for one in found["machines"])


def test_one_machine_fits_80_columns_too(weft, narrow, tmp_path: Path) -> None:
    done = weft("explore", *SHAPE)
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert sum(line.strip(" >").startswith("hetero-unfused-1d@direct ") for line in lines) == 1
    assert "…" not in done.stdout
    (tmp_path / "mine.csv").write_text("id,m,n,k\na,4096,4096,1024\n,1048576,1024,512\n")
    done = weft("explore", "--shapes", "mine.csv")
    assert all(len(line.rstrip()) <= 80 for line in done.stdout.splitlines())
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", "none.toml"), "none.toml cannot be read"),
        (("--layers", "none.json"), "none.json cannot be read"),
        (("--layers", EXAMPLE, "--batch", "2"), "--batch is for a config.json"),
        (("--layers", EXAMPLE, "--m", "64"), "leave out shapes"),
        (("--layers", EXAMPLE, "--html", "x.html"), "there is no page"),
        (("--layers", EXAMPLE, "--world", "9"), "has 8 devices"),
        (("--layers", EXAMPLE, "--dtype", "bf16"), "no dtype 'bf16'"),
        ((*SHAPE, "--batch", "2"), "say which one with --layers"),
        ((*SHAPE, "--machine", "h100,b200", "--html", "x.html"), "shows one machine"),
    ],
)
def test_bad_calls(refused: Callable[..., str], arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("explore", *arguments)


def test_bad_configs(refused: Callable[..., str], config: str, tmp_path: Path) -> None:
    for arguments, words in (
        (("--parallelism", "expert"), "no experts to spread"),
        (("--parallelism", "pipeline"), "no parallelism 'pipeline'"),
        (("--batch", "0"), "batch must be from 1"),
        (("--sequence", "0"), "sequence must be from 1"),
        (("--step", "eval"), "no step 'eval'"),
    ):
        assert words in refused("explore", "--layers", config, *arguments)
    (tmp_path / "config.json").write_text("{")
    assert "is not a JSON file" in refused("explore", "--layers", config)
    (tmp_path / "config.json").write_text("[1]")
    assert "must hold a JSON object" in refused("explore", "--layers", config)
    (tmp_path / "bad.toml").write_text('[[layers]]\nname = "x"\nop = "matmul"\nrows = 3\n')
    assert "unknown key layers[0].rows" in refused("explore", "--layers", "bad.toml")
