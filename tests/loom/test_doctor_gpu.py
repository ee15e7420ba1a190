"""`weft doctor --gpu` on loom: every line but what only a vendor's GPU can show."""

from __future__ import annotations

import pytest

# -- inside the ranks ------------------------------------------------------------------------------


def examine():
    from weft.measure.gpu.examine import _on_rank

    heard = []
    done = _on_rank(lambda share, text: heard.append(text), "loom")
    return done, heard


def test_all_points_on_loom(loom_pools):
    done, heard = loom_pools(2).run(examine)[0]
    checks = {(check.point, check.what): check for check in done.checks}
    wrong = [check for check in done.checks if check.state == "not"]
    assert not wrong
    for size in ("64 KiB", "256 KiB", "1 MiB", "4 MiB"):
        assert checks[5, f"{size} pull"].found == checks[5, f"{size} push"].found == "engine"
    assert checks[5, "256 KiB of columns"].found == "engine"
    assert checks[4, "peers read and write"].state == "ok"
    assert checks[6, "data, then its word"].found.endswith("0 stale bytes")
    assert {check.point for check in done.checks} == set(range(1, 9))
    assert "who copies" in heard
    assert done.machine.startswith("# loom")


def kernels_are_found_out():
    """A driver that copies with a kernel, and one that posts before it copies."""
    import torch
    import torch.distributed as dist

    from weft.loom.driver import LoomDriver
    from weft.measure.gpu.peers import meet, order
    from weft.measure.gpu.spinners import spinner_of, who_copies

    class ByKernel(LoomDriver):
        def copy(self, target, source, stream):
            with stream:
                torch.add(source, 0, out=target)

    class PostsFirst(LoomDriver):
        """What a copy without the stream's order would do."""

        def copy(self, target, source, stream):
            late = torch.Stream("loom")
            late.wait_stream(stream)
            self.sleep(0.02, late)
            super().copy(target, source, late)

    device = torch.device("loom", torch.accelerator.current_device_index())
    peers = meet(device)
    found = []
    if dist.get_rank() == 0:
        found = who_copies(ByKernel(), spinner_of(LoomDriver(), device), peers)
    dist.barrier()
    good = order(LoomDriver(), peers, 3)
    dist.barrier()
    peers.words.zero_()
    torch.accelerator.synchronize()
    dist.barrier()
    bad = order(PostsFirst(), peers, 3)
    return found, good, bad


def test_a_copy_by_a_kernel_and_a_word_that_overtakes(loom_pools):
    found, good, bad = loom_pools(2).run(kernels_are_found_out)[0]
    copies = [check for check in found if "pull" in check.what or "push" in check.what]
    assert [check.found for check in copies] == ["kernel"] * 8
    assert all(check.state == "not" for check in copies)
    assert good.state == "ok"
    assert bad.state == "not"


def spinner_that_leaves_room():
    import torch

    from weft.loom.driver import LoomDriver
    from weft.measure.gpu.peers import meet
    from weft.measure.gpu.spinners import LoomSpinner, who_copies

    driver = LoomDriver()
    peers = meet(torch.device("loom", torch.accelerator.current_device_index()))
    return who_copies(driver, LoomSpinner(driver, 1), peers)


def test_without_a_full_device_nothing_is_claimed(loom_pools):
    (check,) = loom_pools(1).run(spinner_that_leaves_room)[0]
    assert (check.state, check.what) == ("unknown", "who copies")


def first_use(broken):
    import torch
    import torch.distributed as dist

    from weft.errors import Unsupported
    from weft.fabric.device import known_product

    rank, world = dist.get_rank(), dist.get_world_size()

    def everyone(mine):
        heard = [None] * world
        dist.all_gather_object(heard, mine)
        return all(heard)

    def product(shard, w):
        """What a fabric would do, by the host."""
        shards = [torch.empty_like(shard.cpu()) for _ in range(world)]
        dist.all_gather(shards, shard.cpu())
        y = torch.cat(shards).to("loom") @ w
        if broken and rank == 1 and shard.dtype == torch.bfloat16:
            y[0, 0] += 1
        return y

    device = torch.device("loom", torch.accelerator.current_device_index())
    try:
        known_product.check(product, device, rank, world, everyone)
    except Unsupported as error:
        return str(error)
    return ""


def test_known_numbers_before_others(loom_pools, monkeypatch):
    assert loom_pools(2).run(first_use, False) == ["", ""]
    said = loom_pools(2).run(first_use, True)
    assert said[0] == said[1]
    assert "came out wrong on loom (bfloat16)" in said[0]
    assert "run weft doctor --gpu" in said[0]


@pytest.mark.parametrize(("value", "wanted"), [("", True), ("off", False), ("0", False)])
def test_the_check_can_be_turned_off(monkeypatch, value, wanted):
    from weft.fabric.device import known_product

    monkeypatch.setenv("WEFT_CHECK", value)
    assert known_product.wanted() is wanted


def test_the_filling_kernel_ends():
    triton = pytest.importorskip("triton", reason="the kernel needs Triton")
    import torch

    from weft.triton.kernels.spin import spin

    assert triton
    for go, spins in ((0, 3), (1, 1 << 30)):  # by itself, and when it is let go
        started = torch.zeros(4, dtype=torch.int32)
        spin.interpreted[(4,)](torch.full((1,), go, dtype=torch.int32), started, spins)
        assert started.tolist() == [1] * 4
