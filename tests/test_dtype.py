"""The table of dtypes: names of torch, bytes, and numbers that native code shares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from weft import Unsupported
from weft import dtype as dtypes

NATIVE = Path(__file__).parents[1] / "native"
ONLY_MACHINES = ("float8", "float8_blockscale")


@pytest.mark.parametrize("name", [n for n in dtypes.DTYPES if n not in ONLY_MACHINES])
def test_torch_agrees(name):
    dtype = dtypes.find(name)
    assert dtype.torch == getattr(torch, name)
    assert dtype.torch.itemsize == dtype.bytes == dtypes.ITEM_BYTES[name]
    assert dtypes.name_of(dtype.torch) == name
    assert {dtype.accumulator, dtype.result} <= set(dtypes.DTYPES)


def test_what_torch_does_not_have_is_refused():
    with pytest.raises(Unsupported, match="use float8_e4m3fn"):
        _ = dtypes.find("float8").torch
    with pytest.raises(Unsupported, match="did you mean float32"):
        dtypes.find("float31")


def test_the_numbers_of_the_channel_are_those_of_native_code():
    text = (NATIVE / "sums.h").read_text("utf-8")
    short = re.search(r"enum class Dtype : int \{ (.*), other \}", text)[1].split(", ")
    long = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
    names = [re.sub(r"^[a-z]+", lambda m: long.get(m[0], m[0]), one) for one in short]
    names = ["bool" if name == "boolean" else name for name in names]
    numbers = {dtypes.name_of(d): n for d, n in dtypes.channel_numbers().items()}
    assert numbers == {name: number for number, name in enumerate(names)}


def test_a_sum_is_never_rounded_on_its_way():
    assert tuple(n for n in dtypes.MULTIPLIED if dtypes.ITEM_BYTES[n] < 4) == dtypes.NARROW
    for name in dtypes.NARROW:
        assert dtypes.ITEM_BYTES[dtypes.accumulator(name)] == 4
    assert dtypes.rated("float8_e5m2") == "float8"
    assert dtypes.rated("of no one") == "of no one"


def test_tables_elsewhere_come_from_this_one():
    assert list(dtypes.on_host().values()) == list(dtypes.ON_HOST)
    assert dtypes.in_triton()[torch.bfloat16] == "bf16"
    assert set(dtypes.scalar_types().values()) == set(dtypes.summed_in_float32())
    assert torch.float64 not in dtypes.summed_in_float32()
    assert dtypes.PUBLISHED["fp8-blockscale"] == "float8_blockscale"
