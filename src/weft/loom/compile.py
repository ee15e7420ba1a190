"""Registers loom with torch.compile, but not before a program imports the compiler: that takes
long."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_INTERFACE = "torch._dynamo.device_interface"


def register() -> None:
    """At once if the compiler is there, else as soon as it is imported."""
    if _INTERFACE in sys.modules:
        _register(sys.modules[_INTERFACE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch's module of devices as always, and adds loom to it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _INTERFACE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register(interfaces: ModuleType) -> None:
    from weft.loom import torch_module as loom

    base: Any = interfaces.DeviceInterface

    class LoomInterface(base):  # type: ignore[misc]
        """What the compiler asks of a device."""

        device = loom.device
        Event = loom.Event
        Stream = loom.Stream
        current_device = staticmethod(loom.current_device)
        set_device = staticmethod(loom.set_device)
        device_count = staticmethod(loom.device_count)
        is_available = staticmethod(loom.is_available)
        current_stream = staticmethod(loom.current_stream)
        set_stream = staticmethod(loom.set_stream)
        synchronize = staticmethod(loom.synchronize)
        is_bf16_supported = staticmethod(loom.is_bf16_supported)

        @staticmethod
        def get_compute_capability(device: Any = None) -> str:
            return ""

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return False

    interfaces.register_interface_for_device("loom", LoomInterface)
    for index in range(loom.device_count()):
        interfaces.register_interface_for_device(f"loom:{index}", LoomInterface)
