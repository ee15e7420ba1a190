"""Point 5: who copies. Every compute unit is filled with a kernel that waits; what completes
meanwhile needs no compute unit, so an engine did it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft.errors import Unsupported
from weft.fabric.device.device_driver import Driver
from weft.measure.gpu.finding import Finding
from weft.measure.gpu.peers import Peers

if TYPE_CHECKING:
    from weft.loom.driver import LoomDriver

PATIENCE = 0.2
"""Seconds that a copy has, while all units are filled."""
HELD = 1.0
"""Seconds after which the filling kernel ends by itself."""
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)

THREADS = 256
"""Threads of a program: a divisor of what any unit holds, so that no room is left beside them."""
SECONDS_PER_SPIN = 1.5e-7
"""The least time of a poll of host memory with its pause."""


class Spinner(Protocol):
    """Fills every compute unit of a device."""

    patience: float

    def start(self) -> bool:
        """Fills the units; returns whether they are full."""

    def stop(self) -> None:
        """Lets them go, and waits until they are free."""


class TritonSpinner:
    """A Triton kernel with more programs than fit, so that no other kernel finds room."""

    patience = PATIENCE

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        lanes = 64 if torch.version.hip and "gfx9" in properties.gcnArchName else 32
        self._resident = (
            properties.multi_processor_count * properties.max_threads_per_multi_processor // THREADS
        )
        self._warps = THREADS // lanes
        self._go = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._started = torch.zeros(2 * self._resident, dtype=torch.int32, pin_memory=True)
        self._stream = torch.Stream(device)
        self._run(1)  # compiles it
        self._stream.synchronize()

    def _run(self, spins: int) -> None:
        from weft.triton.kernels.spin import spin

        with self._stream:
            spin[(len(self._started),)](self._go, self._started, spins, num_warps=self._warps)

    def start(self) -> bool:
        self._go.zero_()
        self._started.zero_()
        self._run(int(HELD / SECONDS_PER_SPIN))
        return _all_started(self._started, self._resident, HELD / 2)

    def stop(self) -> None:
        self._go.fill_(1)
        self._stream.synchronize()


class LoomSpinner:
    """Kernels that keep the units of an emulated device, one for each."""

    patience = PATIENCE

    def __init__(self, driver: LoomDriver, units: int) -> None:
        self._driver = driver
        self._streams = [torch.Stream("loom") for _ in range(units)]
        self._go = torch.zeros(1, dtype=torch.int32)
        self._started = torch.zeros(1, dtype=torch.int32)

    def start(self) -> bool:
        self._go.zero_()
        self._started.zero_()
        for stream in self._streams:
            self._driver.spin(self._started, self._go, 10 * HELD, stream)
        return _all_started(self._started, len(self._streams), 5 * HELD)

    def stop(self) -> None:
        self._go.fill_(1)
        for stream in self._streams:
            stream.synchronize()


def _all_started(started: torch.Tensor, wanted: int, seconds: float) -> bool:
    """Whether as many programs as wanted run within a time."""
    until = time.monotonic() + seconds
    while int(started.sum()) < wanted and time.monotonic() < until:
        time.sleep(1e-3)
    return int(started.sum()) >= wanted


def spinner_of(driver: Driver, device: torch.device) -> Spinner:
    """The spinner of a device. Raises `Unsupported` if there is none."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            raise Unsupported("the test needs Triton: pip install 'weft[triton]'") from None
        return TritonSpinner(device)
    from weft.loom import settings
    from weft.loom.driver import LoomDriver

    if not isinstance(driver, LoomDriver):
        raise Unsupported(f"there is no kernel that fills a {device.type} device")
    return LoomSpinner(driver, settings().units)


def completes(
    spinner: Spinner, issue: Callable[[torch.Stream], None], stream: torch.Stream
) -> bool | None:
    """Whether what is issued completes while every unit is filled; None if they could not be
    filled."""
    torch.accelerator.synchronize()
    event = torch.Event(stream.device)
    try:
        full = spinner.start()
        issue(stream)
        event.record(stream)
        until = time.monotonic() + spinner.patience
        while not (done := event.query()) and time.monotonic() < until:
            time.sleep(1e-3)
    finally:
        spinner.stop()
    stream.synchronize()
    return done if full else None


def who_copies(driver: Driver, spinner: Spinner, peers: Peers) -> list[Finding]:
    """Point 5, on this rank."""
    stream = torch.Stream(peers.device)
    rows = torch.empty(256, 512, dtype=torch.float32, device=peers.device)
    apart = torch.empty(512, 256, dtype=torch.float32, device=peers.device).t()

    def kernel(on: torch.Stream) -> None:
        with on:
            rows.copy_(apart)

    kept = completes(spinner, kernel, stream)
    if kept is not False:
        text = "the kernel that fills the device left room for another one"
        return [Finding(5, "who copies", "unknown", text, "report it, with the output of this run")]
    checks = []
    for size in SIZES:
        mine, theirs = peers.mine[:size], peers.theirs[:size]
        buffer = torch.empty(size, dtype=torch.uint8, device=peers.device)
        for name, target, source in (("pull", buffer, theirs), ("push", theirs, mine)):
            checks.append(_judged(driver, spinner, f"{_text(size)} {name}", target, source, stream))
    if driver.pitched:
        pitched = peers.theirs[: 1 << 20].view(1024, 1024)[:, :256]
        block = torch.empty(1024, 256, dtype=torch.uint8, device=peers.device)
        checks.append(_judged(driver, spinner, "256 KiB of columns", block, pitched, stream))
    word = peers.words.data_ptr()
    for name, issue in (
        ("post of a word", lambda on: driver.post(word, 1, on)),
        ("wait for a word", lambda on: driver.wait(word, 0, on)),
    ):
        done = completes(spinner, issue, stream)
        found = "needs no compute unit" if done else "needs a compute unit"
        remedy = "" if done else "kernels that fill the device delay it"
        checks.append(Finding(5, name, "ok" if done else "unknown", found, remedy))
    return checks


def _judged(
    driver: Driver,
    spinner: Spinner,
    what: str,
    target: torch.Tensor,
    source: torch.Tensor,
    stream: torch.Stream,
) -> Finding:
    try:
        done = completes(spinner, lambda on: driver.copy(target, source, on), stream)
    except Unsupported as error:
        return Finding(5, what, "not", "refused", str(error))
    if done is None:
        return Finding(5, what, "unknown", "the device could not be filled")
    remedy = ""
    if not done:
        line = "export ROC_P2P_SDMA_SIZE=0 GPU_FORCE_BLIT_COPY_SIZE=0"
        remedy = line if driver.name == "hip" else "two GPUs that reach each other are needed"
    return Finding(5, what, "ok" if done else "not", "engine" if done else "kernel", remedy)


def _text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
