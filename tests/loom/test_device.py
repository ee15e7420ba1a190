"""The device: what torch can ask of it, in one process."""

from __future__ import annotations

import ctypes
import time

import pytest


@pytest.fixture
def one(loom_pools):
    """Runs a function on a rank of its own that has loom."""
    return lambda function, *arguments: loom_pools(1).run(function, *arguments)[0]


# -- inside the rank -------------------------------------------------------------------------------


def issue_a_product():
    import torch

    x = torch.randint(-2, 3, (900, 900)).float()
    a = x.to("loom")
    torch.empty(900, 900, device="loom")  # the result's memory is fresh no more
    event = torch.Event("loom")
    torch.accelerator.synchronize()
    before = time.perf_counter()
    for _ in range(3):
        b = a @ a
    event.record()
    issued = time.perf_counter() - before
    done_at_once = event.query()
    event.synchronize()
    whole = time.perf_counter() - before
    return issued, whole, done_at_once, event.query(), torch.equal(b.cpu(), x @ x)


def test_a_product_is_issued_and_runs_later(one):
    issued, whole, done_at_once, done, exact = one(issue_a_product)
    assert (done_at_once, done, exact) == (False, True, True)
    assert issued < whole / 2


def versions_of_events():
    import torch

    from weft.loom.driver import LoomDriver

    s, t = torch.Stream("loom"), torch.Stream("loom")
    driver, event = LoomDriver(), torch.Event("loom")
    x = torch.zeros(4, device="loom")
    torch.accelerator.synchronize()
    with s:
        x.fill_(1)
    event.record(s)
    t.wait_event(event)
    with t:
        y = x + 0
    started, go = torch.zeros(2, 1, dtype=torch.int32)
    driver.spin(started, go, 20.0, s)  # recorded again behind it: the wait is for the first time
    event.record(s)
    t.synchronize()
    again = event.query()
    go.fill_(1)
    s.synchronize()
    return y.cpu().tolist(), again, event.query(), torch.Event("loom").query()


def test_events_have_versions(one):
    values, again, at_last, never_recorded = one(versions_of_events)
    assert values == [1.0] * 4
    assert (again, at_last, never_recorded) == (False, True, True)


def timing_of_events():
    import torch

    from weft.loom.driver import LoomDriver

    s = torch.Stream("loom")
    first, last = (torch.Event("loom", enable_timing=True) for _ in range(2))
    first.record(s)
    LoomDriver().sleep(0.05, s)
    last.record(s)
    last.synchronize()
    return first.elapsed_time(last)


def test_events_tell_the_time(one):
    assert 45 < one(timing_of_events) < 1000


def priorities():
    """On one unit: a kernel of high priority that came later runs first."""
    import torch

    from weft.loom import log
    from weft.loom.driver import LoomDriver
    from weft.loom.read import read

    driver = LoomDriver()
    holder, low, high = (torch.Stream("loom", priority=p) for p in (0, 0, -1))
    import weft.loom

    weft.loom.clear()
    started, go = torch.zeros(2, 1, dtype=torch.int32)
    words = torch.zeros(2, dtype=torch.int32, device="loom")
    torch.accelerator.synchronize()
    driver.spin(started, go, 20.0, holder)
    while not started.item():
        time.sleep(0.001)
    for name, stream, word in (("low", low, 0), ("high", high, 1)):
        place = words.data_ptr() + 4 * word
        driver.post(place, 1, stream)
        with weft.loom.label(name):
            driver.sleep(0.01, stream)
        while not driver.read(place):
            time.sleep(0.001)
    time.sleep(
        0.1
    )  # both are at their kernels, but for delays that loom inserts, of 0.4 ms at most
    go.fill_(1)
    torch.accelerator.synchronize()
    return [line.label for line in read([log()]) if line.label]


def test_priorities_decide_who_runs_next(loom_pools):
    assert loom_pools(1, units=1).run(priorities)[0] == ["high", "low"]


def memory_of_freed_tensors():
    import torch

    x = torch.empty(1000, device="loom")
    fresh = bool(x.isnan().all())
    place = x.data_ptr()
    x.fill_(1)
    del x
    y = torch.empty(1000, device="loom")
    again = y.data_ptr() == place
    poisoned = bool(y.isnan().all())
    with torch.Stream("loom"):
        z = torch.empty(1000, device="loom")
        other = z.data_ptr() != place
    before = torch.accelerator.memory_allocated()
    big = torch.empty(1 << 20, device="loom")
    grown = torch.accelerator.memory_allocated() - before
    del big
    torch.accelerator.empty_cache()
    return fresh, again, poisoned, other, grown >= 4 << 20, torch.accelerator.memory_allocated()


def test_fresh_and_freed_memory_is_poisoned_and_reused_by_its_stream(one):
    *facts, left = one(memory_of_freed_tensors)
    assert facts == [True] * 5
    assert left < 1 << 20


def a_forgotten_record_stream():
    import torch

    from weft.loom.driver import LoomDriver

    side = torch.Stream("loom")
    x = torch.full((256,), 3.0, device="loom")
    side.wait_stream(torch.accelerator.current_stream())
    LoomDriver().sleep(0.05, side)
    with side:
        y = x + 1
    del x  # its memory goes back at once
    torch.zeros(
        1, device="loom"
    )  # its stream works on and poisons it, while the side stream sleeps
    torch.accelerator.synchronize()
    return y.cpu().isnan().all().item()


def test_a_forgotten_record_stream_shows_in_the_values(one):
    assert one(a_forgotten_record_stream)


def too_much_memory():
    import torch

    try:
        torch.empty(1 << 40, device="loom")
    except RuntimeError as error:
        return str(error)


def test_memory_that_is_not_there_is_an_error(one):
    assert "WEFT_LOOM_HEAP" in one(too_much_memory)


def copies_with_the_host():
    import torch

    pinned = torch.arange(1000.0).pin_memory()
    assert pinned.is_pinned()
    assert not torch.zeros(3).is_pinned()
    x = pinned.to("loom", non_blocking=True)
    back = torch.empty(1000, pin_memory=True)
    back.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    plain = torch.arange(10.0)
    y = plain.to("loom", non_blocking=True)
    plain.fill_(-1)  # memory that is not pinned was read when the copy was issued
    half = torch.empty(1000, dtype=torch.float16).copy_(x)
    return (
        torch.equal(back, pinned),
        torch.equal(y.cpu(), torch.arange(10.0)),
        torch.equal(half, pinned.half()),
    )


def test_copies_to_and_from_the_host(one):
    assert one(copies_with_the_host) == (True, True, True)


def train():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    twin = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    twin.load_state_dict(model.state_dict())
    twin = twin.to("loom")
    x = torch.randn(32, 8)
    for net, inputs in ((model, x), (twin, x.to("loom"))):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            optimizer.step()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.allclose(a, b.cpu(), atol=1e-6) for a, b in pairs)


def test_a_model_trains(one):
    assert one(train)


def fake_tensors_and_compile():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = torch.empty(4, 8, device="loom") @ torch.empty(8, 2, device="loom")
        shape = (tuple(y.shape), y.device.type)

    def step(x, w):
        return torch.nn.functional.relu(x @ w).sum()

    results = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        x = torch.ones(4, 8, device="loom")
        w = torch.ones(8, 2, device="loom", requires_grad=True)
        loss = torch.compile(step, backend=backend, fullgraph=True)(x, w)
        loss.backward()
        results.append((loss.item(), w.grad.sum().item()))
    return shape, results


def test_fake_tensors_and_torch_compile(one):
    shape, results = one(fake_tensors_and_compile)
    assert shape == ((4, 2), "loom")
    assert results == [(64.0, 64.0)] * 2


def names_of_the_device():
    import torch

    module = torch.get_device_module("loom")
    state = module.get_rng_state()
    a = torch.rand(3, device="loom")
    module.set_rng_state(state)
    return (
        str(torch.accelerator.current_accelerator()),
        torch.accelerator.device_count(),
        torch.loom.current_device(),
        torch.tensor(1.0, device="loom").is_loom,
        torch.zeros(2).loom().device.type,
        torch.equal(a, torch.rand(3, device="loom")),
        module._is_in_bad_fork(),
    )


def test_torch_knows_the_device(one):
    assert one(names_of_the_device) == ("loom", 1, 0, True, "loom", True, False)


def address_of_a_tensor():
    import torch

    x = torch.zeros(4, device="loom")
    torch.accelerator.synchronize()
    ctypes.string_at(x.data_ptr(), 4)


def test_a_touch_by_the_host_ends_the_process(loom_pools):
    from loom_ranks import LoomPool

    pool = LoomPool(1)
    try:
        outcome = pool.pool.outcomes(address_of_a_tensor)[0]
    finally:
        pool.close()
    assert outcome.died


def busy_lanes():
    import torch

    import weft.loom

    weft.loom.clear()
    x = torch.ones(64, 64, device="loom")
    with weft.loom.label("the product"):
        x @ x
    timeline = weft.loom.timeline()
    return [(s.lane, s.task, s.kind) for s in timeline.spans]


def test_the_timeline_names_labels(one):
    assert ("compute", "the product", "matmul") in one(busy_lanes)
