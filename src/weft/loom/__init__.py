"""loom: a device for torch that runs on any CPU and finds missing waits.

`load()` registers a device `loom` with asynchronous streams, events, copy engines, peer memory and
graphs. weft itself never loads it. See docs/loom.md.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import backend_registration as backend

from weft import fabric as fabrics
from weft.errors import Error, Unsupported
from weft.fabric.device.device_driver import register as register_driver
from weft.loom import host_order, origin
from weft.loom import torch_module as _device
from weft.loom.build import Report, why_not
from weft.loom.build import library as _build
from weft.loom.deadlock import LoomFinding as Finding
from weft.loom.detector import find
from weft.loom.driver import LoomDriver
from weft.loom.library import is_loaded, loaded, open_library
from weft.loom.loom_session import LoomSession as Session
from weft.loom.read import timeline_of
from weft.loom.settings import MODES, Settings
from weft.timeline import Timeline

_settings: Settings | None = None


def load(report: Report | None = None, **given: object) -> None:
    """Registers the device `loom` in this process; builds its library first if need be. What is
    given are the fields of `Settings`; RANK, WORLD_SIZE and LOCAL_RANK are read as torchrun sets
    them. A second call may change mode, seed, pace and deadline only."""
    global _settings
    settings = Settings.of(**given)
    if is_loaded():
        _change(settings)
        return
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "loom"):
        raise Unsupported(f"this process has a device {name!r} already, and torch takes only one")
    library = open_library(_build(report or _say))
    rank, world = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    library.check(
        library.calls.loom_configure(
            rank,
            world,
            max(1, local_world),
            MODES.index(settings.mode),
            settings.seed,
            settings.queues,
            settings.units,
            settings.pace,
            settings.deadline,
            settings.check,
            settings.heap << 20,
            settings.session.encode(),
        )
    )
    backend.rename_privateuse1_backend("loom")
    torch._register_device_module("loom", _device)  # type: ignore[no-untyped-call]
    library.calls.loom_register()
    library.calls.loom_register_symmetric()
    backend.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_for_compile()
    register_driver("loom", lambda device: LoomDriver())
    fabrics.register("loom", fabrics.open_on_device)
    _device.remember_process()
    if settings.check:
        origin.install(library)
        host_order.install()
    atexit.register(library.calls.loom_shut_down)
    _settings = settings


def settings() -> Settings:
    """What this process's device was loaded with."""
    if _settings is None:
        loaded()
    assert _settings is not None
    return _settings


@contextmanager
def label(text: str) -> Iterator[None]:
    """Names what is issued inside, for findings and timelines: a task of a plan, for example."""
    calls = loaded().calls
    before = calls.loom_current_label()
    calls.loom_label(text.encode())
    try:
        yield
    finally:
        calls.loom_label(before)


def log() -> bytes:
    """What this process has logged; empty unless it was loaded with `check`."""
    import ctypes

    calls = loaded().calls
    size = calls.loom_log(None, 0)
    text = ctypes.create_string_buffer(size)
    calls.loom_log(text, size)
    return text.raw


def findings() -> list[Finding]:
    """What the detector finds in the log of this process alone, after waiting for the device. The
    findings of several ranks are those of their `Session`: `find(session.logs())`."""
    torch.accelerator.synchronize()
    rank = int(os.environ.get("RANK", "0"))
    return find([b""] * rank + [log()])


def timeline() -> Timeline:
    """What ran when on this process's streams and engines."""
    torch.accelerator.synchronize()
    rank = int(os.environ.get("RANK", "0"))
    return timeline_of([b""] * rank + [log()])


def clear() -> None:
    """Forgets the log of this process. Call it when no rank has work under way."""
    torch.accelerator.synchronize()
    loaded().calls.loom_clear_log()


def _change(asked: Settings) -> None:
    global _settings
    now = settings()
    fixed = ("check", "queues", "units", "heap", "session")
    for name in fixed:
        if getattr(asked, name) not in (getattr(now, name), getattr(Settings(), name)):
            raise Unsupported(f"loom is loaded already, and {name} cannot be changed any more")
    calls = loaded().calls
    torch.accelerator.synchronize()
    calls.loom_mode(MODES.index(asked.mode), asked.seed)
    calls.loom_pace(asked.pace)
    calls.loom_deadline(asked.deadline)
    _settings = Settings(
        **{**{n: getattr(now, n) for n in fixed}},
        mode=asked.mode,
        seed=asked.seed,
        pace=asked.pace,
        deadline=asked.deadline,
    )


def _say(share: float, text: str) -> None:
    """Progress of a build, where nobody else shows it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[Kloom: {text}", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)


def _register_for_compile() -> None:
    from weft.loom.compile import register

    register()


__all__ = [
    "Error",
    "Finding",
    "Session",
    "Settings",
    "clear",
    "find",
    "findings",
    "label",
    "load",
    "log",
    "settings",
    "timeline",
    "why_not",
]
