"""Calls on the emulated device: what the tests of this folder have ranks do."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from conformance import Case, tensors
from mutants import captured_call
from ranks import tell

import weft
from weft.fabric.device import symmetric
from weft.loom.library import loaded

SIZES = (24, 6, 12)


def rows(seed: int, count: int = 8):
    """This rank's shard of x, and w, which differ from seed to seed."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x = torch.randint(-2, 3, (count, 12), generator=generator).float()
    w = torch.randint(-2, 3, (12, 6), generator=torch.Generator().manual_seed(seed)).float()
    return x, w


def stated(x, w, group=None, **options):
    """Calls that say the rows of all ranks: their hosts need not hear from each other."""
    every = [x.shape[0]] * dist.get_world_size(group)
    return weft.all_gather_matmul(x, w, shard_rows=every, group=group, **options)


def want(seed: int, group=None, count: int = 8):
    x, w = rows(seed, count)
    found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, x, group=group)
    return torch.cat(found) @ w


def gathers(seed: int, schedule="adaptive@dma", group=None):
    x, w = (tensor.to("loom") for tensor in rows(seed))
    return stated(x, w, schedule=schedule, group=group)


def right(seed: int = 1, schedule: str = "adaptive@dma") -> None:
    """That the group works."""
    assert torch.equal(gathers(seed, schedule).cpu(), want(seed))


def usable() -> None:
    """That the device works, whatever became of the group."""
    a = torch.arange(12.0, device="loom").view(3, 4)
    side = torch.Stream("loom")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        b = a @ a.t()
    torch.accelerator.current_stream().wait_stream(side)
    b.record_stream(torch.accelerator.current_stream())
    assert torch.equal((b + 1).cpu(), a.cpu() @ a.cpu().t() + 1)


def error_of(function, *arguments):
    """The name of the error that a function raises, and its text."""
    try:
        function(*arguments)
    except weft.Error as error:
        return type(error).__name__, str(error)
    return "", ""


# -- faults ----------------------------------------------------------------------------------------


def late(seconds: float) -> None:
    """The last rank comes late: results are exact."""
    wanted = want(3)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)
    assert torch.equal(gathers(3).cpu(), wanted)
    weft.check()


def suspended(deadline: float) -> None:
    """The last rank is late to a first and to a known call; all ranks are suspended meanwhile."""
    wanted = want(3)
    weft.configure(deadline=deadline)
    for turn in range(2):
        dist.barrier()
        tell(f"calling {turn}")
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.6)
        assert torch.equal(gathers(3).cpu(), wanted)
    weft.check()


def late_to_a_known_call() -> None:
    """The last rank comes when the call of the first has returned, whose host does not wait."""
    store = dist.distributed_c10d._get_default_store()
    right(2)
    wanted = want(3)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        store.wait(["returned"], timedelta(seconds=15))
    result = gathers(3)
    store.set("returned", "")
    assert torch.equal(result.cpu(), wanted)
    weft.check()
    dist.barrier()
    store.delete_key("returned")


def too_late(known: bool, deadline: float, seconds: float):
    """The last rank comes after the deadline of the others. What each rank is told, by the call,
    by check, and by the next call; then the device is tried."""
    right(2)
    dist.barrier()
    weft.configure(deadline=deadline)
    call = gathers if known else different
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)
    told = [error_of(call, 3), error_of(weft.check), error_of(call, 4), error_of(weft.check)]
    usable()
    dist.barrier()
    return told


def different(seed: int):
    """A call that was not made before."""
    x, w = rows(seed, 5)
    return stated(x.to("loom"), w.to("loom"), schedule="serial@dma")


def killed(when: str, schedule: str = "adaptive@dma"):
    """The last rank dies before a first call, before a known call, or between replays of a graph.
    What the others are told; the device is tried after it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    right(2, schedule)
    graph = None
    if when == "replay":
        x, w = (tensor.to("loom") for tensor in rows(2))
        call = lambda: stated(x, w, schedule=schedule)  # noqa: E731
        graph, _ = captured_call(call)
        graph.replay()
        torch.accelerator.synchronize()
    dist.barrier()
    if last:
        if when == "during":  # its peers wait for the rest of the call on their devices
            x, w = (tensor.to("loom") for tensor in rows(3))
            driver = weft.fabric.of(None, "loom").driver
            driver.sleep(5.0, torch.accelerator.current_stream())
            stated(x, w, schedule=schedule)
            time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    tell("calling")
    began = time.monotonic()
    if graph is not None:
        graph.replay()
        told = [error_of(weft.check)]
    elif when == "first call":
        told = [error_of(different, 3)]
    else:
        told = [error_of(gathers, 3, schedule), error_of(weft.check)]
    told += [error_of(gathers, 4, schedule), error_of(weft.check)]
    spent = time.monotonic() - began
    usable()
    return told, spent


def killed_unwatched():
    """The last rank dies before a known call, and the watchdog of the others has no time to notice.
    What `weft.check` tells them, when their devices fail."""
    right(2)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    watchdog = weft.fabric.of(None, "loom").watchdog
    watchdog.look = lambda: None
    gathers(2)
    return [error_of(weft.check) for _ in range(2)]


def device_fails():
    """The device of the last rank fails in a known call. What each rank is told by `weft.check` and
    by the calls after it."""
    right(2)
    failing = dist.get_rank() == dist.get_world_size() - 1
    dist.barrier()
    if failing:
        loaded().calls.loom_inject_failure(b"a unit burnt out")
    began = time.monotonic()
    told = []
    for action in (lambda: gathers(3), weft.check, lambda: gathers(4), weft.check):
        try:
            told.append(error_of(action))
        except RuntimeError as error:  # torch's own, of the device that has failed
            told.append(("device", str(error)))
        time.sleep(0.1)
    return told, time.monotonic() - began


def never_opens(deadline: float):
    """The last rank makes no call on its device, although it has made one on the host. What the
    others are told by their first ones, and after how long."""
    weft.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 2))
    dist.barrier()
    began = time.monotonic()
    told = None
    if dist.get_rank() < dist.get_world_size() - 1:
        weft.configure(deadline=deadline)
        told = error_of(gathers, 2)
    spent = time.monotonic() - began
    dist.barrier()
    return told, spent


def killed_in_rendezvous(opened: bool):
    """The last rank dies while the others wait for its memory. What they are told."""
    if opened:
        right(2)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        symmetric.symm_mem.rendezvous = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    x, w = torch.ones(4000, 64, device="loom"), torch.ones(64, 64, device="loom")
    return [error_of(weft.all_gather_matmul, x, w) for _ in range(2)]


def disagrees(how: str, known: bool):
    """The last rank makes another call than the others. What each rank is told, and whether the
    group works afterwards."""
    right(2)
    if known:
        other(how)
        gathers(2)
    dist.barrier()
    odd = dist.get_rank() == dist.get_world_size() - 1
    told = [error_of(other, how) if odd else error_of(gathers, 2)]
    told.append(error_of(weft.check))
    told.append(error_of(gathers, 2))
    told.append(error_of(weft.check))
    right(5)
    usable()
    weft.check()
    return told


def changes_columns(first: int) -> list[str]:
    """The last rank has other columns in every second call, which is allowed unless a peer repeats
    its own sizes before it knows. Either rank `first` or the other comes first. What this rank is
    told."""
    right(2)
    odd = dist.get_rank() == dist.get_world_size() - 1
    x, w = rows(2)
    want_all = want(2)
    told = []
    for turn in range(6):
        columns = 3 if odd and turn % 2 == 0 else 6
        own = w[:, :columns].contiguous().to("loom")
        dist.barrier()
        if dist.get_rank() != first:
            time.sleep(0.05)
        try:
            found = stated(x.to("loom"), own, schedule="adaptive@dma")
            weft.check()
            assert torch.equal(found.cpu(), want_all[:, :columns])
            told.append("")
        except weft.Mismatch as error:
            told.append(str(error))
    dist.barrier()
    right(5)
    weft.check()
    return told


def other(how: str):
    """A call that others do not make."""
    x, w = (tensor.to("loom") for tensor in rows(2))
    if how == "operator":
        return weft.matmul_reduce_scatter(x, w, schedule="adaptive@dma")
    if how == "sizes":
        return stated(x[:, :6].contiguous(), w[:6], schedule="adaptive@dma")
    if how == "schedule":
        return stated(x, w, schedule="serial@dma")
    assert how == "refused"
    return stated(x, w[:5], schedule="adaptive@dma")


# -- capture ---------------------------------------------------------------------------------------


class Captured:
    """A captured call of an operator, whose inputs can be changed."""

    def __init__(self, name: str, schedule: str, seed: int = 5) -> None:
        self.name, self.schedule = name, schedule
        self.case = self._case(seed)
        self.example = self.case.example.map(lambda tensor: tensor.to("loom"))
        self.call()  # so that it is known
        self.graph: torch.accelerator.Graph | None = None

    def _case(self, seed: int) -> Case:
        case = Case(self.name, 5, shape=SIZES, sizes=(7, 9), particular=self._particular())
        change = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        case.example = case.example.map(
            lambda t: (
                t
                if not t.is_floating_point()
                else torch.randint(-2, 3, t.shape, generator=change).to(t.dtype)
            )
        )
        return case

    def _particular(self):
        return {"batch": 13, "max_tables": 2} if self.name.startswith("embedding") else {}

    def call(self):
        with torch.device("loom"):
            return self.example.call(self.case.operator.function, schedule=self.schedule)

    def capture(self) -> None:
        self.graph, self.result = captured_call(self.call)

    def change(self, seed: int) -> None:
        """Other values in the same inputs."""
        self.case = self._case(seed)
        for ours, theirs in zip(self.example.tensors, self.case.example.tensors, strict=True):
            ours.copy_(theirs)

    def check(self) -> None:
        found, wanted = tensors(self.result), tensors(self.case.plain())
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours.cpu().double(), theirs), (self.name, self.schedule)


def replays(name: str, schedule: str, eager: bool = True) -> None:
    """Three replays with changed inputs, and eager calls between them."""
    captured = Captured(name, schedule)
    captured.capture()
    for seed in (11, 12, 13):
        captured.change(seed)
        captured.graph.replay()
        captured.check()
        if eager:
            right(seed)
    captured.graph.reset()
    weft.check()


def two_in_one_graph() -> None:
    x, w = (tensor.to("loom") for tensor in rows(2))
    v = torch.ones(6, 12, device="loom")

    def layer():
        y = stated(x, w, schedule="adaptive@dma")
        return y, weft.matmul_reduce_scatter(y, v, schedule="adaptive@dma")

    layer()
    graph, (y, z) = captured_call(layer)
    for seed in (3, 4, 5):
        x.copy_(rows(seed)[0])
        w.copy_(rows(seed)[1])
        graph.replay()
        wanted = want(seed)
        assert torch.equal(y.cpu(), wanted)
        total = wanted @ torch.ones(6, 12) * dist.get_world_size()
        assert torch.equal(z.cpu(), total.tensor_split(dist.get_world_size())[dist.get_rank()])
    graph.reset()


def unknown_capture():
    """A capture of a call that was not made before, on all ranks."""
    right(1)
    x = torch.ones(3, 12, device="loom")
    w = torch.ones(12, 4, device="loom")
    told = error_of(captured_call, lambda: stated(x, w))
    right(2)
    y = stated(x, w)
    assert torch.equal(y.cpu(), torch.full((3 * dist.get_world_size(), 4), 12.0))
    return told


def lone_capture():
    """One rank captures what the others do at once."""
    right(2)
    x, w = (tensor.to("loom") for tensor in rows(2))

    def call():
        return stated(x, w, schedule="adaptive@dma")

    call()
    dist.barrier()
    if dist.get_rank() == 0:
        told = [error_of(captured_call, call), error_of(weft.check)]
    else:
        told = [error_of(call), error_of(weft.check)]
    told.append(error_of(gathers, 2))
    told.append(error_of(weft.check))
    right(3)
    return told
