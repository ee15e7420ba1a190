"""Points 1 to 3: versions, topology, and variables that change who copies."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from weft.fabric.device.device_driver import Driver
from weft.fabric.device.hip import FORBIDDING, SMALL_COPIES
from weft.measure.gpu.finding import Finding, State

CAREFUL = {
    "CUDA_LAUNCH_BLOCKING": ("1", "unset CUDA_LAUNCH_BLOCKING: every launch waits for its end"),
    "HIP_LAUNCH_BLOCKING": ("1", "unset HIP_LAUNCH_BLOCKING: every launch waits for its end"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "export CUDA_DEVICE_MAX_CONNECTIONS=8: with 1, copies wait for kernels",
    ),
    "GPU_MAX_HW_QUEUES": ("1", "export GPU_MAX_HW_QUEUES=4: with 1, copies wait for kernels"),
    **{name: ("0", f"unset {name}: with 0, kernels copy between GPUs") for name in FORBIDDING},
}
"""Values that take the overlap away, each with the line to run before Python starts."""


def title_of(device: torch.device) -> str:
    """The name of a device, as its vendor says."""
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return str(name(device)) if name is not None else device.type


def versions(driver: Driver, device: torch.device) -> list[Finding]:
    """Point 1."""
    facts, count = driver.facts(), torch.accelerator.device_count()
    checks = [Finding(1, "torch", "ok", torch.__version__)]
    for name, version in facts.versions.items():
        checks.append(Finding(1, f"{facts.name} {name}", "ok", version))
    architecture = _architecture(device)
    memory = _memory(device)
    what = f"{count} x {title_of(device)}" + f", {architecture}" * bool(architecture) + memory
    checks.append(Finding(1, "devices", "ok" if count else "not", what))
    try:
        import triton

        checks.append(Finding(1, "triton", "ok", triton.__version__))
    except ImportError:
        remedy = "pip install 'weft[triton]' for the kernels and for who copies"
        checks.append(Finding(1, "triton", "unknown", "none", remedy))
    return checks


def topology(driver: Driver, device: torch.device) -> list[Finding]:
    """Point 2."""
    facts = driver.facts()
    checks = []
    if facts.peers:
        pairs = [
            reach for a, row in enumerate(facts.peers) for b, reach in enumerate(row) if a != b
        ]
        alone = "only one device is visible; peers need two" if not pairs else ""
        remedy = "" if pairs and all(pairs) else alone or "use devices that reach each other"
        found = f"{sum(pairs)} of {len(pairs)} pairs"
        state: State = "ok" if pairs and all(pairs) else "not" if pairs else "unknown"
        checks.append(Finding(2, "devices reach each other", state, found, remedy))
    else:
        checks.append(Finding(2, "devices reach each other", "unknown", "the driver cannot say"))
    for name, value in facts.attributes.items():
        checks.append(Finding(2, name, "ok", str(value)))
    checks.append(
        Finding(2, "streams wait for words", "ok", "yes")
        if facts.stream_words
        else Finding(2, "streams wait for words", "not", "no", "use a newer driver")
    )
    kind = "unknown: the copy speed below tells NVLink or xGMI from PCIe"
    checks.append(Finding(2, "kind of link", "unknown", kind))
    return checks


def environment(driver: Driver, given: Mapping[str, str] = os.environ) -> list[Finding]:
    """Point 3."""
    facts = driver.facts()
    checks = []
    for name, value in sorted(facts.environment.items()):
        bad, remedy = CAREFUL.get(name, (None, ""))
        wrong = value == bad
        checks.append(Finding(3, name, "not" if wrong else "ok", value, remedy if wrong else ""))
    if facts.name == "hip":
        for name, wanted in SMALL_COPIES.items():
            if given.get(name) != wanted:
                line = f"export {name}={wanted}: otherwise kernels may make small copies"
                checks.append(Finding(3, name, "unknown", given.get(name, "not set"), line))
    if not checks:
        checks.append(Finding(3, "variables that change who copies", "ok", "none is set"))
    return checks


def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName)
    return f"sm_{properties.major}{properties.minor}"


def _memory(device: torch.device) -> str:
    try:
        _, total = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return ""
    return f", {total / 2**30:.0f} GiB each"
