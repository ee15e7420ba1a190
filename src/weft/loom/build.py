"""Builds loom's library for the torch that is installed, once, and keeps it.

The library links torch, so it fits one version of it and is never part of a wheel: the sources are
(`weft/loom/native`; in a checkout `native/loom`). Objects are kept by the hash of what went into
them, in `~/.cache/weft/loom` (or WEFT_LOOM_CACHE), so that a change compiles only what it touches.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import torch

from weft.errors import Error, Unsupported

TESTED = "2.13"
"""The torch whose extension points loom uses: others have other ones."""

Report = Callable[[float, str], None]


def why_not() -> str:
    """Why loom cannot be had here, as a sentence; empty where it can."""
    if not torch.__version__.startswith(TESTED + "."):
        return f"loom is made for torch {TESTED}, and torch {torch.__version__} is installed"
    if library_path().exists():
        return ""
    if compiler() is None:
        return "loom is compiled when it is first used and found no C++ compiler; install g++"
    if not (_torch() / "include" / "ATen" / "ATen.h").exists():
        return "loom is compiled when it is first used and this torch came without its headers"
    return ""


def compiler() -> str | None:
    named = os.environ.get("CXX", "")
    return next((c for c in (named, "c++", "g++", "clang++") if c and shutil.which(c)), None)


def sources() -> Path:
    """Where loom's C++ is: beside this file once installed, in `native/loom` in a checkout."""
    here = Path(__file__).resolve().parent
    for place in (here.parents[2] / "native" / "loom", here / "native"):
        if (place / "core.h").exists():
            return place
    raise Unsupported("loom's sources are missing from this installation of weft; reinstall it")


def library(report: Report | None = None) -> Path:
    """The path of the library, built if need be. Processes that want it at once build it once."""
    kept = library_path()
    if kept.exists():
        return kept
    reason = why_not()
    if reason:
        raise Unsupported(reason)
    with _alone(kept.parent):
        if not kept.exists():
            _build(kept, report or (lambda share, text: None))
    return kept


def _build(target: Path, report: Report) -> None:
    cxx = compiler()
    assert cxx is not None
    headers = b"".join(path.read_bytes() for path in sorted(sources().glob("*.h")))
    # The longest first, so that they do not run alone at the end.
    names = sorted(sources().glob("*.cpp"), key=lambda p: (not p.name.startswith("torch_"), p.name))
    for left in target.parent.glob("tmp*"):  # by a build that was killed; nobody else builds now
        shutil.rmtree(left, ignore_errors=True)
    report(0.0, f"compiling loom for torch {torch.__version__}, about a minute, once")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            jobs = {
                pool.submit(_compile, cxx, source, headers, target.parent): source
                for source in names
            }
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                report(done / (len(names) + 1), f"compiled {jobs[job].name}")
            objects = [str(job.result()) for job in jobs]
        made = Path(scratch) / target.name
        places = [f"-L{_torch() / 'lib'}", f"-Wl,-rpath,{_torch() / 'lib'}"]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl", "-lpthread"]
        _run([cxx, "-shared", "-o", str(made), *objects, *places, *libraries])
        made.rename(target)
    report(1.0, "built")


def _compile(cxx: str, source: Path, headers: bytes, folder: Path) -> Path:
    flags = _flags(source)
    key = hashlib.sha256(source.read_bytes() + headers + " ".join(flags).encode()).hexdigest()[:16]
    target = folder / f"{source.stem}-{key}.o"
    if not target.exists():
        fresh = target.with_suffix(f".{os.getpid()}")
        _run([cxx, *flags, "-c", str(source), "-o", str(fresh)])
        fresh.rename(target)
    return target


def _flags(source: Path) -> list[str]:
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread"]
    if not source.name.startswith("torch_"):
        return [*flags, "-O2", "-Wall", "-Wextra"]
    include = _torch() / "include"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    # torch's headers warn; -O1 keeps the build short, and what runs long is in torch itself.
    headers = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    return [*flags, "-O1", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *headers]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "nothing")
        raise Error(f"loom cannot be built: `{command[0]}` said: {said}")


def _torch() -> Path:
    return Path(torch.__file__).parent


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def library_path() -> Path:
    """Where the library for this torch and these sources is kept, built or not."""
    cache = Path(os.environ.get("WEFT_LOOM_CACHE") or _cache() / "weft" / "loom")
    digest = hashlib.sha256()
    for path in sorted(sources().glob("*.[ch]*")):
        digest.update(path.name.encode() + path.read_bytes())
        digest.update(" ".join(_flags(path)).encode())
    return cache / f"torch-{torch.__version__}" / f"loom-{digest.hexdigest()[:16]}.so"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
