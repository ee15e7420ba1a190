"""`weft doctor`: what this machine has, what weft can use, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import Json, console, print_json, progress
from weft.cli.doctor_cpu import processors
from weft.cli.doctor_gpu import examined, show, write_machine
from weft.errors import Error, Unsupported, nearest
from weft.measure.launch import Report, launch
from weft.report.terminal_table import table

DEVICES = ("cuda", "loom")


@dataclass(frozen=True)
class DoctorLine:
    """The result of one check. `remedy` explains how to get what is missing."""

    what: str
    found: str
    ok: bool
    remedy: str = ""


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Examine the GPUs that are here, in nine points.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="With --gpu: cuda (also ROCm), or loom, the emulated device.")
    ] = "cuda",
    machine: Annotated[
        Path | None, typer.Option(help="With --gpu: write a machine file for weft explore.")
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine; exits with 1 if something that weft needs does not work."""
    if device not in DEVICES:
        raise Unsupported(f"there is no device {device!r}{nearest(device, DEVICES)}")
    if gpu:
        examination = examined(device, json)
        if json:
            print_json(examination.as_dict())
            if machine is not None:
                write_machine(examination, machine)
        else:
            show(examination, machine)
        if any(check.state == "not" for check in examination.checks):
            raise typer.Exit(1)
        return
    with progress("looking", quiet=json) as report:
        findings = [*_system(), *_processors(), *_packages(), _call(report)]
    broken = [f for f in findings if not f.ok]
    if json:
        print_json({"findings": [asdict(f) for f in findings], "ok": not broken})
    else:
        rows = [[f.what, f.found, "ok" if f.ok else "MISSING", f.remedy] for f in findings]
        console.print(table(["what", "found", "", "what to do"], rows))
        console.print("weft works here." if not broken else "weft does not work here yet.")
    if broken:
        raise typer.Exit(1)


def _system() -> list[DoctorLine]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    linux = platform.system() == "Linux"
    has_pidfd = hasattr(os, "pidfd_open") and _works(lambda: os.close(os.pidfd_open(os.getpid())))
    has_memfd = hasattr(os, "memfd_create") and _works(lambda: os.close(os.memfd_create("weft")))
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "")
    return [
        DoctorLine(
            "system", f"{platform.system()} {platform.release()}", linux, "" if linux else "Linux"
        ),
        DoctorLine(
            "cores",
            str(cores),
            True,
            "" if cores > 1 else "one core: ranks share it, so overlap cannot be measured",
        ),
        DoctorLine("memory", f"{memory:.0f} GiB", True),
        DoctorLine(
            "shared memory (memfd)",
            "yes" if has_memfd else "no",
            has_memfd,
            "" if has_memfd else "a kernel from 3.17 on",
        ),
        DoctorLine(
            "watching peers (pidfd)",
            "yes" if has_pidfd else "no",
            has_pidfd,
            "" if has_pidfd else "a kernel from 5.3 on",
        ),
        DoctorLine(
            "C++ compiler", compiler or "none", True, "" if compiler else "only to build weft"
        ),
    ]


def _processors() -> list[DoctorLine]:
    import torch

    from weft.fabric.host.numa import nodes

    lines = processors(nodes(), os.sched_getaffinity(0), torch.get_num_threads(), dict(os.environ))
    return [DoctorLine(what, found, True, remedy) for what, found, remedy in lines]


def _packages() -> list[DoctorLine]:
    import torch

    findings = [DoctorLine("torch", torch.__version__, True)]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    remedy = "weft doctor --gpu examines it"
    if gpu == "none":
        remedy = "not needed: the host fabric runs on CPUs"
    findings.append(DoctorLine("GPU", gpu, True, remedy))
    try:
        from triton import __version__ as triton_version

        findings.append(DoctorLine("triton", triton_version, True))
    except ImportError:
        findings.append(DoctorLine("triton", "none", True, "only for weft.triton: weft[triton]"))
    findings.append(_loom())
    for package, use in (("rich", "tables"), ("numpy", "plan checks")):
        present = importlib.util.find_spec(package) is not None
        version = importlib.metadata.version(package) if present else "none"
        fix = "" if present else f"pip install {package} ({use})"
        findings.append(DoctorLine(package, version, present, fix))
    return findings


def _loom() -> DoctorLine:
    """The emulated accelerator, which nothing else needs."""
    from weft.loom.build import library_path, why_not

    reason = why_not()
    found = "no" if reason else "built" if library_path().exists() else "built when first used"
    return DoctorLine("loom (weft loom check)", found, True, reason)


def _call(report: Report) -> DoctorLine:
    """Runs a call on two ranks and checks its result."""
    try:
        exact = all(launch(2, _two_ranks, report=report))
    except Error as error:
        return DoctorLine("all_gather_matmul on 2 ranks", "failed", False, str(error))
    found = "exact" if exact else "a wrong product"
    return DoctorLine("all_gather_matmul on 2 ranks", found, exact, "" if exact else "report a bug")


def _two_ranks(report: Report) -> bool:
    import torch
    import torch.distributed as dist

    import weft

    whole = torch.arange(12.0).reshape(4, 3)
    w = torch.eye(3)
    y = weft.all_gather_matmul(whole.tensor_split(2)[dist.get_rank()], w, schedule="adaptive@dma")
    return bool(torch.equal(y, whole))


def _works(function: object) -> bool:
    try:
        function()  # type: ignore[operator]
    except OSError:
        return False
    return True
