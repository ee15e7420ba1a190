"""Summaries of a model's calls by layer and operator, and the ranges that profilers see."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft


class Block(nn.Module):
    """A gather, a product that is summed, and a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Linear(weft.all_gather_matmul)
        self.down = Linear(weft.matmul_reduce_scatter)

    def forward(self, x):
        return self.down(self.up(x))


class Linear(nn.Module):
    def __init__(self, multiply) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 32) / 32)
        self.multiply = multiply

    def forward(self, x):
        return self.multiply(x, self.weight, schedule="adaptive@dma")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return weft.all_reduce(x.detach()) + x


def summarized(tmp):
    model, x = Model(), torch.ones(16, 32)
    with weft.record() as recording:
        for _ in range(2):
            model(x).sum().backward()
        handle = weft.all_gather(torch.ones(5), async_op=True)
        handle.wait()
        while_active = weft.summary()
    with torch.no_grad():
        model(x)  # not recorded
    told = weft.summary()
    assert told == weft.summary(recording)
    assert len(while_active.rows) == len(told.rows)
    told.page(f"{tmp}/page{dist.get_rank()}.html")
    assert not nn.modules.module._global_forward_pre_hooks, "hooks end with the recording"
    return told, str(told), told.json()


def test_a_summary_has_the_calls_of_every_layer(ranks, tmp_path):
    told, text, as_json = ranks(2).run(summarized, str(tmp_path))[1]
    rows = {(row.layer, row.operation): row for row in told.rows}
    for number in (0, 1):
        forward = rows[f"layers.{number}.up", "all_gather_matmul"]
        assert (forward.calls, forward.schedule) == (2, "adaptive@dma")
        assert forward.why == "asked for"
        assert forward.seconds > 0
        assert 0 <= forward.exposed < forward.seconds
        assert forward.serial > 0
        assert rows[f"layers.{number}.down", "matmul_reduce_scatter"].calls == 2
        back = rows[f"layers.{number}.down", "all_gather_matmul (backward)"]
        assert back.calls == 2
        assert (f"layers.{number}.up", "gather_contract (backward)") in rows
    assert rows["Model", "all_reduce"].calls == 2
    assert rows["Model", "all_reduce"].exposed == rows["Model", "all_reduce"].serial
    outside = rows["-", "all_gather"]
    assert (outside.schedule, outside.exposed) == ("dma, in background", None)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).endswith("times as long.")
    assert "layers.1.up" in text
    assert "(1) adaptive@dma: asked for" in text
    assert [row["layer"] for row in json.loads(as_json)["rows"]] == [r.layer for r in told.rows]
    page = (tmp_path / "page0.html").read_text()
    assert "layers.0.down" in page
    assert "Timelines" in page


def counted():
    x, w = torch.ones(4, 32), torch.ones(32, 32)
    before = {(r.operation, r.schedule): r.calls for r in weft.summary().rows}
    with torch.no_grad():
        for _ in range(5):
            weft.matmul_all_reduce(x, w)
    return before, weft.summary(), str(weft.summary())


def test_without_a_recording_calls_are_counted(fresh_ranks):
    before, told, text = fresh_ranks(2).run(counted)[0]
    assert before == {}
    (row,) = told.rows
    assert (row.operation, row.calls, row.asked) == ("matmul_all_reduce", 5, "auto")
    assert row.exposed is None
    assert not told.recorded
    assert "with weft.record()" in text


def profiled():
    x, w = torch.ones(4, 32), torch.ones(32, 32)
    weft.matmul_all_reduce(x, w)
    weft.matmul_all_reduce(x, w)  # a known call from now on
    out = torch.empty(4, 32)
    with torch.profiler.profile() as profiler:
        weft.matmul_all_reduce(x, w)
        weft.all_gather_matmul(x, w)
        weft.all_reduce(x, out=out)  # the shortest path
        weft.all_gather(x, async_op=True).wait()
        weft.all_to_all(x, *(([3, 1], [3, 2]) if dist.get_rank() == 0 else ([2, 2], [1, 2])))
        w.requires_grad_()
        weft.matmul_reduce_scatter(x, w).sum().backward()
    return [event.key for event in profiler.key_averages()]


def test_the_profiler_sees_every_path(ranks):
    names = ranks(2).run(profiled)[0]
    wanted = {
        "weft.matmul_all_reduce",
        "weft.all_gather_matmul",
        "weft.all_reduce",
        "weft.all_gather",
        "weft.all_gather.wait",
        "weft.all_to_all",
        "weft.matmul_reduce_scatter",
    }
    assert wanted <= set(names)


@pytest.mark.parametrize("calls", [0, 3])
def test_the_verdict_is_a_sentence(calls):
    from weft.report.summary import Row

    rows = [Row("-", "x", "serial@dma", "auto", "", 3, 1.0, 0.5, 1.5)] if calls else []
    text = weft.Summary(tuple(rows), True).verdict()
    assert text.endswith(".")
    assert ("no weft calls" in text) == (calls == 0)
