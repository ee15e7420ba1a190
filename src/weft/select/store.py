"""Results of `weft tune`, kept in the user's cache directory: one small file for each question.

A question is a machine, the threads of a rank, an operation, a bucket of sizes, a dtype, a world, a
link and a version of weft. Each has a file of its own, which is written under another name and then
renamed. So writers never wait for each other, and readers see a complete answer, the old or the new
one. A damaged file is renamed, with a warning, and ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import torch

from weft.errors import Error
from weft.machine import calibrated
from weft.operation import dtypes_label
from weft.schedule import Schedule
from weft.select.sizes import sizes_of


@dataclass(frozen=True)
class Question:
    """The key of an answer. Sizes are rounded to half octaves: the next one is 1.4 times as
    large."""

    machine: str
    threads: int
    operation: str
    dtype: str
    world: int
    link: str
    m: int
    n: int
    k: int
    version: str

    @property
    def path(self) -> Path:
        return folder() / self.file

    @property
    def file(self) -> str:
        """The name of the answer's file."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=12).hexdigest()
        return f"{self.operation}-{digest}.json"


@dataclass(frozen=True)
class Answer:
    """The fastest schedule, with its seconds and those of serial."""

    schedule: Schedule
    seconds: float
    serial_seconds: float


def folder() -> Path:
    """The folder of the answers; it may not exist yet."""
    return calibrated.cache() / "tuned"


def listed() -> frozenset[str]:
    """The names of all files in the folder."""
    try:
        return frozenset(os.listdir(folder()))
    except OSError:
        return frozenset()


def question(operation: Any, link: str, version: str) -> Question:
    """The question of an operation on this machine."""
    sizes = sizes_of(operation)
    m, n, k = sizes.m, sum(sizes.columns), sizes.k
    return Question(
        machine=this_machine(),
        threads=torch.get_num_threads(),
        operation=operation.name,
        dtype=dtypes_label(operation),
        world=operation.world,
        link=link,
        m=bucket(m),
        n=bucket(n),
        k=bucket(k),
        version=version,
    )


def keep(asked: Question, answer: Answer) -> Path:
    """Writes an answer atomically."""
    content = {
        "question": asdict(asked),
        "schedule": answer.schedule.name,
        "seconds": answer.seconds,
        "serial_seconds": answer.serial_seconds,
    }
    text = json.dumps({**content, "digest": _digest(content)}, indent=1)
    return calibrated.write(asked.path, text)


def find(asked: Question) -> Answer | None:
    """The answer to a question; None if there is no valid one."""
    path = asked.path
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(
            f"weft cannot read the tuned result {path} ({error.strerror}); going on without it",
            stacklevel=2,
        )
        return None
    try:
        return _read(text, asked)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, Error) as error:
        _set_aside(path, error)
        return None


def _read(text: bytes, asked: Question) -> Answer:
    content = json.loads(text)
    digest = content.pop("digest")
    if digest != _digest(content):
        raise ValueError("its digest does not fit its content")
    if content["question"] != asdict(asked):
        raise ValueError("it answers another question")
    return Answer(
        Schedule.parse(content["schedule"]),
        float(content["seconds"]),
        float(content["serial_seconds"]),
    )


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_suffix(f".{secrets.token_hex(4)}.corrupt")
    try:
        os.replace(path, aside)
    except FileNotFoundError:
        return  # another process has renamed it, and warned
    except OSError:
        aside = path
    reason = str(error) or type(error).__name__
    warnings.warn(
        f"the tuned result {path.name} does not hold ({reason}); it is now {aside}, "
        "and the heuristic chooses until it is tuned again",
        stacklevel=3,
    )


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def bucket(size: int) -> int:
    """The size rounded to half octaves; 0 stays 0."""
    return 0 if size < 1 else round(2.0 ** (round(2.0 * log2(size)) / 2.0))


@lru_cache(maxsize=1)
def this_machine() -> str:
    """The name of this machine in results: its processor and its number of cores."""
    model = platform.processor() or platform.machine()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1] for line in file if "model name" in line), model)
    return f"{model.strip()}, {os.cpu_count()} cores"
