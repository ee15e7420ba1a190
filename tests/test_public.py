"""What a user sees of the package: its names, short forms of its objects, and notebooks' tables."""

from __future__ import annotations

import importlib.metadata
from xml.etree import ElementTree

import pytest
import torch

import weft
from weft import Unsupported
from weft.machine import load
from weft.operation import find
from weft.run.explain import Explanation
from weft.study.exploration import explore
from weft.study.scenarios import Shape

TIMELINE = weft.Timeline(
    tuple(
        weft.Span(rank, lane, f"<{lane} & {i}>", kind, 0.001 * i, 0.001 * (i + 1))
        for rank in (0, 1)
        for lane, kind in (("compute", "matmul"), ("from 1", "copy"))
        for i in range(50)
    ),
    "a & b",
)


def test_dir_has_the_public_names_and_no_others():
    assert dir(weft) == sorted(weft.__all__)
    assert {"nn", "compile", "launch", "loom", "summary"} <= set(dir(weft))
    assert all(hasattr(weft, name) for name in dir(weft))
    assert weft.__version__ == importlib.metadata.version("weft")


def test_a_timeline_is_shown_in_one_line():
    assert repr(TIMELINE) == "<Timeline a & b: 50.000 ms, 200 spans of 2 ranks>"
    one = weft.Timeline(TIMELINE.spans[:1])
    assert repr(one) == "<Timeline without a title: 1.000 ms, 1 span of 1 rank>"


def test_a_notebook_draws_a_timeline():
    shown = ElementTree.fromstring(f"<div>{TIMELINE._repr_html_()}</div>")
    bars = shown.findall(".//rect")
    assert len(bars) == 200
    assert bars[0].find("title").text == "<compute & 0>: 1.000 ms"
    assert [t.text for t in shown.findall(".//text")][:2] == ["rank 0, compute", "rank 0, from 1"]


def test_a_notebook_shows_an_explanation():
    found = Explanation("op", "serial@dma", "<asked>", 0.5, {"dma": 2_000_000}, 3, 0, None)
    shown = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    rows = {row[0].text: row[1].text for row in shown.iter("tr")}
    assert rows["schedule"] == "serial@dma (<asked>)"
    assert rows["moved"] == "2.00 MB by dma"
    assert all(said in str(found) for said in rows.values())


def test_a_notebook_shows_an_exploration():
    found = explore(load("h100"), "all_gather_matmul", [Shape(4096, 4096, 1024)], 8)
    assert repr(found) == "<Exploration of all_gather_matmul on 8 ranks of h100: 1 shape>"
    shown = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    first = [cell.text for cell in shown.findall(".//tbody/tr")[0]]
    assert first[1] == str(found.scenarios[0].best.schedule)
    assert len(shown.findall(".//tbody/tr")) == 12


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_one_rank_is_one_rank(name):
    assert find(name).of(8, 8, 8, 1, "float32").label.endswith("on 1 rank")
    assert find(name).of(8, 8, 8, 2, "float32").label.endswith("on 2 ranks")


SIZES = {"operation": "all_gather_matmul", "m": 8, "n": 6, "k": 4, "world": 2}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"operation": None}, "operation must be the name"),
        ({"operation": []}, "operation must be the name"),
        ({"operation": "all_gather_matmull"}, "did you mean all_gather_matmul"),
        ({"m": "8"}, "m must be a whole number of at least 0, not '8'"),
        ({"m": -1}, "m must be a whole number"),
        ({"m": 8.5}, "m must be a whole number"),
        ({"n": -1}, "n must be a whole number"),
        ({"k": None}, "k must be a whole number"),
        ({"world": 0}, "world must be a whole number of at least 1, not 0"),
        ({"world": True}, "world must be a whole number"),
        ({"dtype": 3}, "dtype must be a dtype of torch or its name"),
        ({"dtype": torch.complex64}, "there is no dtype 'complex64'"),
        ({"schedule": 3}, "schedule must be a name or a weft.Schedule"),
    ],
)
def test_workspace_of_what_cannot_be_is_refused(wrong, said):
    with pytest.raises(Unsupported, match=said):
        weft.workspace_bytes(**{**SIZES, **wrong})


def test_workspace_by_dtype():
    for schedule in ("auto", "serial", weft.Schedule.parse("adaptive")):
        for name in ("float32", "bfloat16"):
            asked = {**SIZES, "schedule": schedule}
            named = weft.workspace_bytes(**asked, dtype=name)
            assert named == weft.workspace_bytes(**asked, dtype=getattr(torch, name)) > 0
    assert weft.workspace_bytes(**{**SIZES, "m": 0}) == 0


def test_only_groups_are_checked():
    for wrong in (3, "all", object()):
        with pytest.raises(Unsupported, match="group must be a process group"):
            weft.check(wrong)
    weft.check()
