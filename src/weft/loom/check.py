"""Runs a script on several ranks, each with a loom device, and says what was wrong.

Every rank is a process with the environment that torchrun sets. Nothing outlives the call: ranks
die with it, and their logs are in its memory.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from weft.errors import Unsupported, signal_name
from weft.loom.build import Report, library
from weft.loom.deadlock import LoomFinding
from weft.loom.detector import find
from weft.loom.loom_session import LoomSession
from weft.loom.read import timeline_of
from weft.loom.settings import Settings
from weft.timeline import Timeline

_PATIENCE = 10.0
"""Seconds that the other ranks have to end once one has failed."""


@dataclass(frozen=True)
class CheckedRun:
    """What became of a run. codes: the exit code of each rank, below zero a signal. failed: a
    sentence if the script itself failed."""

    findings: list[LoomFinding]
    codes: list[int]
    failed: str
    seconds: float
    timeline: Timeline

    @property
    def exit_code(self) -> int:
        """0: nothing was found. 1: something was. 2: the script itself failed."""
        return 1 if self.findings else 2 if self.failed else 0


def check(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    world: int = 2,
    settings: Settings | None = None,
    within: float | None = None,
    quiet: bool = False,
    report: Report | None = None,
) -> CheckedRun:
    """Runs the script once on every rank with the detector on. within: seconds after which a run
    that does not end is ended. quiet: what the script prints is not shown."""
    if not os.path.exists(script):
        raise Unsupported(f"there is no script {script}")
    library(report)
    started = time.monotonic()
    with LoomSession(world) as session:
        settings = replace(settings or Settings(), check=True, session=session.path)
        traces = [os.memfd_create("loom traces", os.MFD_CLOEXEC) for _ in range(world)]
        try:
            codes, errors = _run(script, arguments, world, settings, traces, within, quiet)
            texts = [os.pread(file, 1 << 20, 0).decode(errors="replace") for file in traces]
        finally:
            for file in traces:
                os.close(file)
        logs = session.logs()
        lost = [session.status(rank).log_lost for rank in range(world)]
    findings = find(logs)
    _add_lines(findings, texts)
    findings = _own(findings, logs, codes)
    failed = _failure(codes, errors, findings)
    if any(lost):
        failed = failed or f"the logs were too small by {sum(lost)} lines; check a shorter run"
    seconds = time.monotonic() - started
    return CheckedRun(findings, codes, failed, seconds, timeline_of(logs, script.name))


def _run(
    script: Path,
    arguments: Sequence[str],
    world: int,
    settings: Settings,
    traces: Sequence[int],
    within: float | None,
    quiet: bool,
) -> tuple[list[int], list[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    shown: list[threading.Thread] = []
    errors = [os.memfd_create("loom errors", os.MFD_CLOEXEC) for _ in range(world)]
    try:
        for rank in range(world):
            environment = {
                **os.environ,
                **settings.environment(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            }
            trace = f"/proc/{os.getpid()}/fd/{traces[rank]}"
            command = [sys.executable, "-m", "weft.loom.rank", trace, str(script), *arguments]
            out = subprocess.DEVNULL if quiet else subprocess.PIPE
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=out, stderr=errors[rank])
            )
            if ranks[-1].stdout is not None:
                shown.append(threading.Thread(target=_show, args=(ranks[-1].stdout,), daemon=True))
                shown[-1].start()
        codes = _wait(ranks, within)
        for thread in shown:
            thread.join(timeout=1.0)  # a process that the script has left behind may hold the pipe
        said = [os.pread(file, 1 << 20, 0).decode(errors="replace") for file in errors]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in errors:
            os.close(file)
    if not quiet:
        for text in said:
            sys.stderr.write(text)
    return codes, said


def _show(output: IO[bytes]) -> None:
    """Shows what a rank prints, in whole lines."""
    for line in output:
        sys.stdout.write(line.decode(errors="replace"))
        sys.stdout.flush()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], within: float | None) -> list[int]:
    until = time.monotonic() + within if within else float("inf")
    while any(process.poll() is None for process in ranks):
        now = time.monotonic()
        if any(process.poll() for process in ranks):
            until = min(until, now + _PATIENCE)
        if now > until:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.01)
    return [process.returncode for process in ranks]


def _own(
    findings: list[LoomFinding], logs: Sequence[bytes], codes: Sequence[int]
) -> list[LoomFinding]:
    """Without what only follows from the failure of a script: that its peers then stood still."""
    fell = any(code and b'\n["x",' not in log for code, log in zip(codes, logs, strict=True))
    if not fell:
        return findings
    follow = ("deadlock", "aliasing", "stall", "failure")
    return [f for f in findings if f.kind not in follow]


def _failure(codes: Sequence[int], errors: Sequence[str], findings: Sequence[LoomFinding]) -> str:
    for rank, code in enumerate(codes):
        if not code:
            continue
        if code < 0:
            return f"rank {rank} was ended by {signal_name(-code)}"
        last = [line for line in errors[rank].splitlines() if line.strip()]
        # The rank that failed first tells more than those that lost it.
        if "has ended while" in (last[-1] if last else "") and rank + 1 < len(codes):
            continue
        return f"rank {rank} ended with code {code}" + (f": {last[-1]}" if last else "")
    failed = next((r for r, code in enumerate(codes) if code), None)
    return "" if failed is None else f"rank {failed} ended with code {codes[failed]}"


def _add_lines(findings: list[LoomFinding], traces: Sequence[str]) -> None:
    """The line of the script at which a host touched device memory, from the trace it left."""
    inside = (
        str(Path(torch.__file__).parent),
        str(Path(__file__).parent),
        "<frozen",
        "/lib/python",
    )
    for finding in findings:
        if finding.kind != "touch":
            continue
        for i, operation in enumerate(finding.operations):
            for file, number in re.findall(r'File "(.+?)", line (\d+)', traces[operation.rank]):
                if not any(part in file for part in inside):
                    finding.operations[i] = replace(operation, line=f"{file}:{number}")
                    finding.text += f" at {file}:{number}"
                    break
