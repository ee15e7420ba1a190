"""The drivers of CUDA and HIP, executed against loom's library in place of the vendor's."""

from __future__ import annotations

import pytest

DRIVERS = ("loom", "cuda", "hip", "hip-engine")

# -- inside the ranks ------------------------------------------------------------------------------


def made(kind):
    from weft.fabric.device import cuda, hip
    from weft.loom.driver import LoomDriver, vendor_path

    if kind == "loom":
        return LoomDriver()
    if kind == "cuda":
        return cuda.CudaDriver(0, vendor_path())
    before = hip.ENGINE_KEPT
    hip.ENGINE_KEPT = 0 if kind == "hip-engine" else before
    try:
        return hip.HipDriver(0, vendor_path())
    finally:
        hip.ENGINE_KEPT = before


def symmetric(*shape):
    """A symmetric tensor of whole numbers, and the view of the other rank's."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(*shape, dtype=torch.int32, device="loom")
    handle = symm.rendezvous(x, dist.group.WORLD)
    return x, handle.get_buffer(1 - dist.get_rank(), shape, torch.int32)


def copies_and_words(kind):
    """Rows and columns of the other rank, between a post and a wait on both sides."""
    import torch
    import torch.distributed as dist

    from weft.errors import Unsupported
    from weft.fabric.device.device_driver import EQUAL

    driver, rank = made(kind), dist.get_rank()
    (x, theirs), (words, peer_words) = symmetric(6, 8), symmetric(4)
    words.zero_()
    dist.barrier()
    torch.accelerator.synchronize()
    dist.barrier()
    s, here = torch.Stream("loom"), torch.accelerator.current_stream()
    x.copy_(torch.arange(48).reshape(6, 8) + 100 * rank)
    whole = torch.zeros(6, 8, dtype=torch.int32, device="loom")
    columns = torch.zeros(6, 3, dtype=torch.int32, device="loom")
    s.wait_stream(here)
    driver.post(peer_words.data_ptr(), 7, s)
    driver.wait(words.data_ptr(), 5, s)  # 7 is at least 5
    driver.copy(whole, theirs, s)
    driver.copy(whole[:0], theirs[:0], s)
    refused = ""
    try:
        driver.copy(columns, theirs[:, 2:5], s)
    except Unsupported as error:
        refused = str(error)
    # As in a graph: exactly 1, then back to 0.
    driver.post(peer_words.data_ptr() + 4, 1, s)
    driver.wait(words.data_ptr() + 4, 1, s, EQUAL)
    driver.post(words.data_ptr() + 4, 0, s)
    capturing = driver.capturing(s)
    here.wait_stream(s)
    expected = torch.arange(48).reshape(6, 8) + 100 * (1 - rank)
    right = torch.equal(whole.cpu(), expected.int())
    pitched = torch.equal(columns.cpu(), expected[:, 2:5].int())
    found = words.cpu().tolist()
    dist.barrier()
    return right, pitched, refused, driver.pitched, capturing, found


@pytest.mark.parametrize("kind", DRIVERS)
def test_copies_posts_and_waits(loom_pools, kind):
    for right, pitched, refused, can, capturing, found in loom_pools(2).run(copies_and_words, kind):
        assert right
        assert pitched == can == (not kind.startswith("hip"))
        assert ("ROCm copies rows that are apart with a kernel" in refused) != can
        assert not capturing
        assert found == [7, 0, 0, 0]


def a_captured_exchange(kind):
    """The same in a graph, replayed with other numbers: every replay waits anew."""
    import torch
    import torch.distributed as dist

    from weft.fabric.device.device_driver import EQUAL

    driver, rank = made(kind), dist.get_rank()
    (x, theirs), (words, peer_words) = symmetric(64), symmetric(2)
    words.zero_()
    y = torch.zeros(64, dtype=torch.int32, device="loom")
    source = torch.zeros(64, dtype=torch.int32, device="loom")
    torch.accelerator.synchronize()
    dist.barrier()
    graph, seen = torch.accelerator.Graph(), []
    side = torch.Stream("loom")
    with side:
        graph.capture_begin()
        x.copy_(source)
        seen.append(driver.capturing(side))
        driver.post(peer_words.data_ptr(), 1, side)
        driver.wait(words.data_ptr(), 1, side, EQUAL)
        driver.post(words.data_ptr(), 0, side)
        driver.copy(y, theirs, side)
        # Nobody overwrites x before the other has read it.
        driver.post(peer_words.data_ptr() + 4, 1, side)
        driver.wait(words.data_ptr() + 4, 1, side, EQUAL)
        driver.post(words.data_ptr() + 4, 0, side)
        graph.capture_end()
    results = []
    for number in range(3):
        source.fill_(10 * number + rank)
        graph.replay()
        results.append(y.cpu().unique().tolist())
    dist.barrier()
    return seen, results


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_words_in_a_graph(loom_pools, kind):
    for rank, (seen, results) in enumerate(loom_pools(2).run(a_captured_exchange, kind)):
        assert seen == [True]
        assert results == [[1 - rank], [11 - rank], [21 - rank]]


def words_from_the_host(kind):
    """A watchdog's thread reads a word and ends a wait, while the stream stands still."""
    import threading

    import torch

    from weft.loom.driver import LoomDriver

    driver = made(kind)
    words = torch.zeros(2, dtype=torch.int32, device="loom")
    torch.accelerator.synchronize()
    s, busy = torch.Stream("loom"), torch.Stream("loom")
    LoomDriver().sleep(1.0, busy)  # otherwise loom would say that nobody can go on
    driver.wait(words.data_ptr(), 3, s)
    found = []

    def watch():
        found.append((driver.read(words.data_ptr()), s.query()))
        driver.release(words.data_ptr(), 3)
        found.append(driver.read(words.data_ptr()))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    s.synchronize()
    found.append(busy.query())
    torch.accelerator.synchronize()
    return found


@pytest.mark.parametrize("kind", DRIVERS)
def test_the_host_reads_and_writes_words_meanwhile(loom_pools, kind):
    ((before, waits), after, busy) = loom_pools(1).run(words_from_the_host, kind)[0]
    assert (before, waits, after, busy) == (0, False, 3, False)


def facts_and_failures(kind):
    import os

    import torch

    from weft.errors import Error, Unsupported
    from weft.fabric.device.calls import open_library
    from weft.fabric.device.device_driver import driver_of

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.environ["HSA_ENABLE_SDMA"] = "0"
    limited = made(kind).facts()
    s, texts = torch.Stream("loom"), []
    x = torch.zeros(4, dtype=torch.int32, device="loom")
    calls = [
        lambda: made(kind).copy(x, x, s),
        lambda: made(kind).copy(x, x.long(), s),
        lambda: made(kind).copy(x[::2], x[:2], s),
        lambda: made(kind).wait(x.data_ptr() + 1, 1, s),
        lambda: made(kind).calls.cuNoSuchName,
        lambda: open_library("/no/such/library.so", "libcuda", ()),
        lambda: open_library(None, "libnothing", ("libnothing.so.9",)),
    ]
    for call in calls:
        try:
            call()
            texts.append("")
        except (Error, Unsupported, AttributeError) as error:
            texts.append(str(error))
    del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"], os.environ["HSA_ENABLE_SDMA"]
    driver = made(kind)
    missing = driver.calls._checked("cuNoSuchCall", ())
    try:
        missing()
    except Unsupported as error:
        texts.append(str(error))
    torch.accelerator.synchronize()
    known = driver_of(torch.device("loom")).name
    return driver.facts(), limited, texts, known


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_facts_and_failures(loom_pools, kind):
    facts, limited, texts, known = loom_pools(1).run(facts_and_failures, kind)[0]
    assert known == "loom"
    assert facts.name == kind
    assert facts.version == {"cuda": "13.0", "hip": "7.2.0"}[kind]
    assert facts.stream_words
    assert facts.peers == ((True,),)
    assert facts.attributes["copy engines"] == 1
    assert facts.environment.keys().isdisjoint({"CUDA_DEVICE_MAX_CONNECTIONS", "HSA_ENABLE_SDMA"})
    if kind == "cuda":
        assert facts.copies == limited.copies == "engine"
        assert limited.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in text for text in limited.limits)
        assert texts[0] == ""
    else:
        assert (facts.copies, limited.copies) == ("unknown", "kernel")
        assert "HSA_ENABLE_SDMA=0" in limited.limits[0]
        assert texts[0] == texts[1] == texts[2] == limited.limits[0]
    if kind == "cuda":
        assert "equal tensors" in texts[1]
        assert "items are adjacent" in texts[2]
    assert "invalid argument (error 1); streams" in texts[3]
    assert texts[4] == "cuNoSuchName has no signature"
    assert "weft found no libcuda library" in texts[5]
    assert "weft found no libnothing library" in texts[6]
    assert "it has no cuNoSuchCall" in texts[7]
