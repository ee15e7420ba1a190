"""Runs tests under sanitizers: `make sanitize`. With `address` or `thread` as its first argument it
runs one of them only; further arguments say what pytest is to run.

Two builds of the native part, each in a folder of its own (build/sanitize/NAME), so that the
ordinary one is left alone:

    address   address and undefined behaviour; leaks are looked for in the native tests only, for
              Python itself leaves memory behind when it ends
    thread    data races

Under each of them the native tests run first (those of loom's runtime too), then the Python suites
that use the native part most. Of cases that differ only in the number of ranks one runs: see
selection.py; WEFT_SANITIZE=all takes all of them.
The first finding ends the process in which it is made, so the test it is made in fails; reports are
collected from all processes and shown in the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SUITES = [
    *("tests/native/test_hardening.py", "tests/fabric", "tests/collectives", "tests/run"),
    "tests/ops",
]

MEMORY = "it measures memory, of which a sanitizer takes several times as much, and keeps some"
MEASURED = {
    "tests/collectives/test_faults.py::test_nothing_leaks_over_many_cancelled_collectives": MEMORY,
    "tests/run/test_sequences.py::test_random_calls[four ranks]": MEMORY,
}
"""Tests that cannot pass under a sanitizer, with the reason."""


@dataclass(frozen=True)
class Sanitizer:
    """One build: what it looks for, and what its runtime is told."""

    name: str
    flags: str
    library: str
    options: dict[str, str]
    native_options: dict[str, str]


def options(*parts: str) -> str:
    return ":".join(parts)


def sanitizers(logs: Path) -> dict[str, Sanitizer]:
    log = f"log_path={logs}/report"
    asan = (
        "abort_on_error=0",
        "detect_stack_use_after_return=0",
        "quarantine_size_mb=16",  # of every rank; by default 256, and there are many ranks
        "malloc_context_size=8",
        "allocator_may_return_null=1",  # a test asks for more than there is
        log,
    )
    ubsan = options("print_stacktrace=1", log)
    tsan = (
        "halt_on_error=1",
        "second_deadlock_stack=1",
        "die_after_fork=0",  # ranks fork from a server, before any thread of weft is there
        "ignore_noninstrumented_modules=1",  # torch, gloo and Python were built without it
        "allocator_may_return_null=1",
        "report_signal_unsafe=0",  # Python's own handler allocates; weft installs none
        f"suppressions={HERE / 'thread.txt'}",
        log,
    )
    return {
        "address": Sanitizer(
            "address",
            "address,undefined",
            "libasan.so",
            {"ASAN_OPTIONS": options("detect_leaks=0", *asan), "UBSAN_OPTIONS": ubsan},
            {"ASAN_OPTIONS": options("detect_leaks=1", *asan), "UBSAN_OPTIONS": ubsan},
        ),
        "thread": Sanitizer(
            "thread",
            "thread",
            "libtsan.so",
            {"TSAN_OPTIONS": options(*tsan)},
            {"TSAN_OPTIONS": options("halt_on_error=1", log)},
        ),
    }


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run([str(c) for c in command], check=True, env=os.environ | environment, cwd=ROOT)


NATIVE = ("native_tests", "loom_tests")


def build_tests(sanitizer: Sanitizer, folder: Path) -> list[Path]:
    run(
        "cmake", "-S", ROOT / "native", "-B", folder, "-DWEFT_MODULES=OFF", "-DWEFT_TESTS=ON",
        f"-DWEFT_SANITIZE={sanitizer.flags}", "--log-level=WARNING",
    )  # fmt: skip
    cores = str(os.cpu_count() or 1)
    run("cmake", "--build", folder, "--parallel", cores, "--target", *NATIVE, "--", "--quiet")
    return [folder / name for name in NATIVE]


def build_python(sanitizer: Sanitizer, folder: Path) -> Path:
    """A Python that sees this weft, built with a sanitizer, and otherwise what we see."""
    site, tools = folder / "site", folder.parent / "tools"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not tools.exists():  # at a place that stays, so that only what has changed is built again
        needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        run(*pip, "--target", tools, *needed)
    shutil.rmtree(site, ignore_errors=True)
    run(
        *pip, "--no-build-isolation", "--no-deps", "--target", site,
        "-C", f"cmake.define.WEFT_SANITIZE={sanitizer.flags}",
        "-C", "cmake.build-type=RelWithDebInfo", "-C", "install.strip=false",
        "-C", f"build-dir={folder / 'module'}", ROOT, PYTHONPATH=str(tools),
    )  # fmt: skip
    environment = folder / "venv"
    if not environment.exists():
        run(sys.executable, "-m", "venv", "--without-pip", environment)
    ours = next(p for p in sys.path if p.endswith("site-packages"))
    theirs = next(environment.glob("lib/python*/site-packages"))
    (theirs / "weft.pth").write_text(f"{site}\n{ours}\n")
    for script in (site / "bin").glob("*"):
        text = script.read_text().split("\n", 1)[1]
        (environment / "bin" / script.name).write_text(f"#!{environment / 'bin/python'}\n{text}")
        (environment / "bin" / script.name).chmod(0o755)
    return environment / "bin" / "python"


def library(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
    return found.stdout.strip()


def check(sanitizer: Sanitizer, folder: Path, logs: Path, arguments: list[str]) -> list[str]:
    """What is wrong under one sanitizer."""
    wrong = []
    for tests in build_tests(sanitizer, folder / "tests"):
        began = time.monotonic()
        if subprocess.run([tests], env=os.environ | sanitizer.native_options).returncode:
            wrong.append(f"{tests.name} fails")
        took = time.monotonic() - began
        print(f"{tests.name} under {sanitizer.name}: {took:.0f} s", flush=True)
    python = build_python(sanitizer, folder)
    environment = os.environ | sanitizer.options
    # Beside the C++ library: the runtime looks for its exceptions when the process starts.
    environment["LD_PRELOAD"] = f"{library(sanitizer.library)} {library('libstdc++.so.6')}"
    environment["PYTHONMALLOC"] = "malloc"  # so that every object of Python is its own block
    environment["WEFT_TEST_POOLS"] = "3"  # a rank takes several times as much memory
    environment["WEFT_TEST_PATIENCE"] = "5"
    environment["PYTHONPATH"] = str(HERE)
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "selection"]
    command += arguments or SUITES
    command += [f"--deselect={test}" for test in MEASURED]
    began = time.monotonic()
    if subprocess.run(command, env=environment, cwd=ROOT).returncode:
        wrong.append("Python tests fail")
    print(f"Python tests under {sanitizer.name}: {time.monotonic() - began:.0f} s", flush=True)
    for report in sorted(logs.glob("report*")):
        wrong.append(report.read_text(errors="replace"))
    return wrong


def main() -> int:
    names = [a for a in sys.argv[1:2] if a in ("address", "thread")] or ["address", "thread"]
    arguments = sys.argv[2:] if sys.argv[1:2] == names[:1] else sys.argv[1:]
    failed = 0
    for name in names:
        folder = ROOT / "build" / "sanitize" / name
        logs = folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        wrong = check(sanitizers(logs)[name], folder, logs, arguments)
        print("\n".join(wrong) or f"nothing was found by the {name} sanitizer", flush=True)
        failed += bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
