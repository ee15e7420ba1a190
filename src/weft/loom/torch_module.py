"""`torch.loom`: what torch expects of the module of a device, registered when loom is loaded."""

from __future__ import annotations

import os
from typing import Any

import torch

from weft.fabric.device.device_driver import stream_handle
from weft.loom.library import is_loaded, loaded

_loaded_in = 0


def remember_process() -> None:
    global _loaded_in
    _loaded_in = os.getpid()


def is_available() -> bool:
    return is_loaded()


def is_initialized() -> bool:
    return is_loaded()


def init() -> None:
    loaded()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    """Streams are threads, which a fork does not copy."""
    return _loaded_in not in (0, os.getpid())


def device_count() -> int:
    return int(loaded().calls.loom_device_count()) if is_loaded() else 0


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: torch.device | int | str) -> None:
    index = torch.device(device).index if isinstance(device, str) else device
    torch.accelerator.set_device_index(current_device() if index is None else index)


class device(torch.accelerator.device_index):  # noqa: N801
    """Makes a device current for a while, as `torch.cuda.device`."""

    def __init__(self, device: torch.device | int | str) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        super().__init__(index)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(device)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """A stream is its own context manager."""
    return stream


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802
    return torch.Stream(device if device is not None else "loom", priority=priority)


def Event(*, enable_timing: bool = False) -> torch.Event:  # noqa: N802
    return torch.Event("loom", enable_timing=enable_timing)


def is_current_stream_capturing() -> bool:
    return bool(loaded().calls.loom_capturing(stream_handle(current_stream())))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


memory_allocated = torch.accelerator.memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_stats = torch.accelerator.memory_stats
mem_get_info = torch.accelerator.get_memory_info


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (1, 0)


def get_device_name(device: Any = None) -> str:
    return "loom, an emulated device of weft"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def manual_seed(seed: int, device: int | None = None) -> None:
    index = current_device() if device is None else device
    loaded().calls.loom_manual_seed(index, seed % 2**64)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        manual_seed(seed, index)


def get_rng_state(device: Any = "loom") -> torch.Tensor:
    calls, index = loaded().calls, _index(device)
    state = torch.empty(calls.loom_rng_state(index, None, 0), dtype=torch.uint8)
    calls.loom_rng_state(index, state.data_ptr(), state.numel())
    return state


def set_rng_state(new_state: torch.Tensor, device: Any = "loom") -> None:
    state = new_state.contiguous()
    loaded().calls.loom_set_rng_state(_index(device), state.data_ptr(), state.numel())


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index
