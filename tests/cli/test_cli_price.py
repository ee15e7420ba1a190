"""`weft price`: tables that fit, parts that add up, machines side by side, and plain refusals."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

GEMM = ("gemm", "--m", "4096", "--n", "4096", "--k", "4096")


def test_a_gemm_on_four_machines_fits_80_columns(weft, narrow) -> None:
    done = weft("price", *GEMM, "--machine", "mi300x,h100,b200,rtxpro6000")
    assert done.returncode == 0, done.stderr
    assert all(len(line.rstrip()) <= 80 for line in done.stdout.splitlines())
    assert "…" not in done.stdout
    for words in ("kernel start and end", "in all", "TFLOP/s", "Nearest measurement, h100"):
        assert words in done.stdout
    assert "is the quickest" in done.stdout


def test_a_gemm_as_data(weft) -> None:
    found = json.loads(weft("price", *GEMM, "--machine", "h100", "--units", "66", "--json").stdout)
    assert found["ms"] == pytest.approx(sum(part["ms"] for part in found["parts"]))
    assert found["units"] == 66
    assert found["times_all_units"] > 1.5
    near = found["nearest_measurement"]
    assert near["source"].startswith("gemm_h100")
    assert near["measured"] > 0


def test_collectives_by_both_engines(weft, narrow) -> None:
    done = weft("price", "collective", "--size", "1MiB", "--machine", "h100,mi300x,b200")
    assert done.returncode == 0, done.stderr
    assert all(len(line.rstrip()) <= 80 for line in done.stdout.splitlines())
    assert "…" not in done.stdout
    found = json.loads(weft("price", "collective", "--size", "1MiB", "--json").stdout)
    assert [one["engine"] for one in found["prices"]] == ["cores", "dma"]
    for one in found["prices"]:
        assert one["ms"] == pytest.approx(sum(part["ms"] for part in one["parts"]))
        assert (one["size_bytes"], one["total_bytes"]) == (1 << 20, 8 << 20)


def test_what_is_asked_about_decides_the_engine(weft) -> None:
    def engine(*arguments: str) -> str:
        return json.loads(weft("price", *arguments, "--json").stdout)["engine"]

    asked = ("collective", "--size", "64KiB")
    assert engine(*asked, "--units", "8") == "cores"
    assert engine(*asked, "--variant", "b2b") == "dma"
    assert engine(*asked, "--prelaunched") == "dma"
    assert engine("copy", "--size", "64KiB", "--prelaunched") == "dma"


def test_copies(weft) -> None:
    done = weft("price", "copy", "--size", "64KiB", "--machine", "mi300x,mi355x")
    assert done.returncode == 0, done.stderr
    assert "measured 17 GB/s" in done.stdout.replace("\n", "").replace("  ", " ")
    assert "until the waiter knows" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gemm", "--m", "0", "--n", "1", "--k", "1"), "m must be from 1"),
        ((*GEMM, "--batch", "0"), "batch must be from 1"),
        ((*GEMM, "--dtype", "bf16"), "did you mean bfloat16"),
        ((*GEMM, "--units", "0"), "compute units to give, not 0"),
        ((*GEMM, "--machine", "h1000"), "no machine named 'h1000'"),
        (("collective", "--size", "1", "--collective", "gather"), "did you mean all_gather"),
        (("collective", "--size", "0"), "at least 1 byte"),
        (("collective", "--size", "1,2"), "give one size"),
        (("collective", "--size", "1", "--world", "9"), "has 8 devices"),
        (("collective", "--size", "1", "--engine", "nic"), "cores or dma"),
        (("collective", "--size", "1", "--engine", "dma", "--units", "3"), "leave out --units"),
        (("collective", "--size", "1", "--variant", "swap"), "has no variant 'swap'"),
        (("copy", "--size", "1", "--rows", "0"), "rows must be from 1"),
        (("copy", "--size", "big"), "is not a size"),
    ],
)
def test_bad_calls(refused: Callable[..., str], arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("price", *arguments)
