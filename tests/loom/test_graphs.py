"""Graphs: what is captured, what is refused, and what a replay runs."""

from __future__ import annotations

import pytest


@pytest.fixture
def one(loom_pools):
    return lambda function, *arguments: loom_pools(1).run(function, *arguments)[0]


# -- inside the rank -------------------------------------------------------------------------------


def replays_with_new_inputs():
    """Asynchronous kernels, operators of the fallback, and memory allocated in the capture."""
    import torch

    s = torch.Stream("loom")
    x, w = torch.ones(4, 8, device="loom"), torch.ones(8, 2, device="loom")
    torch.accelerator.synchronize()
    graph = torch.accelerator.Graph()
    with s, graph:
        hidden = x @ w
        y = torch.relu(hidden - 10).exp().sum(dim=1)
        pieces = torch.split(hidden, 2)
        total = pieces[0] + pieces[1]
        captured = torch.accelerator.current_stream().is_capturing()
    before = bool(y.isnan().all())  # nothing has run yet
    values = []
    for value in (1.0, 2.0):
        x.fill_(value)
        s.wait_stream(torch.accelerator.current_stream())
        with s:
            graph.replay()
        torch.accelerator.current_stream().wait_stream(s)
        values.append((y.cpu().tolist(), total.cpu().tolist()[0]))
    graph.reset()
    return captured, before, values


def test_a_replay_runs_on_what_is_there_then(one):
    captured, before, values = one(replays_with_new_inputs)
    assert captured
    assert before
    big = pytest.approx([2 * 2.718281828**6] * 4, rel=1e-4)
    assert values[0] == ([2.0] * 4, [16.0, 16.0])
    assert values[1][0] == big
    assert values[1][1] == [32.0, 32.0]


def refusals():
    import torch

    found = {}

    def tried(name, call):
        try:
            call()
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error)

    s, other = torch.Stream("loom"), torch.Stream("loom")
    x = torch.ones(4, device="loom")
    outside = s.record_event()
    torch.accelerator.synchronize()
    tried("default stream", lambda: torch.accelerator.Graph().capture_begin())
    graph = torch.accelerator.Graph()
    with s:
        graph.capture_begin()
        x.add_(1)
        tried("synchronize", s.synchronize)
        tried("item", lambda: x.sum().item())
        tried("nonzero", lambda: x.nonzero())
        tried("outside", lambda: s.wait_event(outside))
        inside = s.record_event()
        tried("query", inside.query)
        graph.capture_end()
    tried("over", lambda: other.wait_event(inside))
    tried("again", graph.capture_begin)
    graph.reset()
    with s:
        graph.capture_begin()
        other.wait_stream(s)
        with other:
            x.add_(1)
        tried("unjoined", graph.capture_end)
    tried("nothing", graph.replay)
    torch.accelerator.synchronize()
    return found, (x + 0).cpu().tolist()


def test_what_a_capture_cannot_hold_is_refused(one):
    found, values = one(refusals)
    for name, text in (
        ("default stream", "the default stream cannot capture"),
        ("synchronize", "while the stream is capturing"),
        ("nonzero", "while capturing"),
        ("outside", "recorded outside of the capture"),
        ("query", "cannot be queried"),
        ("over", "a capture that is over"),
        ("again", "reset it first"),
        ("unjoined", "not joined back"),
        ("nothing", "captured nothing"),
    ):
        assert text in found[name], (name, found[name])
    assert found["item"]
    assert values == [1.0] * 4  # nothing that was captured has run
