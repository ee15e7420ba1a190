"""Checks the instructions around flags in the machine code of a kernel. Correctness depends on
them.

- Before a release, on every path, there is no store to memory after the barrier of the program, and
  (AMD) no wave passes that barrier with unfinished stores.
- The release itself is `.release.sys` (NVIDIA), or writes back the caches and waits for that (AMD).
- An acquire is `.acquire.sys` (NVIDIA), or invalidates the caches after the value has arrived
(AMD). No thread reads memory before the barrier that follows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.triton.ahead import TARGETS, Build


@dataclass(frozen=True)
class Audit:
    """The number of releases and acquires for the whole system, and their faults."""

    releases: int
    acquires: int
    faults: tuple[str, ...]


def audit(build: Build) -> Audit:
    """Reads the assembly of a build."""
    amd = TARGETS[build.target].backend == "hip"
    return audit_amdgcn(build.assembly) if amd else audit_ptx(build.assembly)


def audit_ptx(text: str) -> Audit:
    code = _Code.of(text, re.compile(r"(?:@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$\w+)"), r"@.*\bbra\b")
    barrier = _matching(r"\b(?:bar|barrier)(?:\.cta)?\.sync")
    store = _matching(r"\b(?:st|red|atom)\.(?!shared|volatile\.shared|local)")
    load = _matching(r"\bld\.(?!shared|param|volatile\.shared|local|const)|\bcp\.async.*\.global")
    releases = code.find(r"\b(?:red|atom|st)\..*\.sys\..*\brelease\b|\.release\.sys")
    acquires = code.find(r"\b(?:ld|atom)\..*\.sys\..*\bacquire\b|\.acquire\.sys")
    faults: list[str] = []
    for at in releases:
        faults += code.search(at, code.previous, barrier, store, "stored after the barrier", True)
    for at in acquires:
        faults += code.search(at, code.following, barrier, load, "read before the barrier", True)
    return Audit(len(releases), len(acquires), tuple(faults))


def audit_amdgcn(text: str) -> Audit:
    code = _Code.of(text, re.compile(r"s_c?branch\w*\s+(\.\w+)"), r"s_cbranch")
    barrier = _matching(r"^s_barrier\b")
    store = _matching(r"^(?:global|flat|buffer)_(?:store|atomic)")
    load = _matching(r"^(?:global|flat|buffer)_(?:load|atomic)")
    drained = _matching(r"^s_waitcnt.*vmcnt\(0\)")
    faults: list[str] = []
    releases, acquires = [], []
    for at in code.find(r"^(?:global|flat)_atomic_\w+ .*\bsc1\b"):
        released = code.nearest(at, -1, r"^buffer_wbl2 sc0 sc1$", r"^s_waitcnt.*vmcnt\(0\)")
        acquired = code.nearest(at, +1, r"^buffer_inv sc0 sc1$", r"^s_waitcnt.*vmcnt\(0\)")
        releases += [at] if released else []
        acquires += [at] if acquired else []
        if not released and not acquired:
            faults.append(f"neither released nor acquired: {code.lines[at]}")
    for at in releases:
        faults += code.search(at, code.previous, barrier, store, "stored after the barrier", True)
        for gate in code.reach(at, code.previous, barrier):
            faults += code.search(
                gate, code.previous, drained, store, "passed the barrier with a store under way"
            )
    for at in acquires:
        faults += code.search(at, code.following, barrier, load, "read before the barrier", True)
    return Audit(len(releases), len(acquires), tuple(faults))


Test = Callable[[str], bool]


def _matching(pattern: str) -> Test:
    compiled = re.compile(pattern)
    return lambda line: compiled.search(line) is not None


@dataclass
class _Code:
    """Instructions, with the possible next and previous ones of each."""

    lines: list[str] = field(default_factory=list)
    following: list[list[int]] = field(default_factory=list)
    previous: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, text: str, branch: re.Pattern[str], conditional: str) -> _Code:
        code = cls()
        labels: dict[str, int] = {}
        for raw in text.splitlines():
            line = re.split(r"//|;(?!$)", raw)[0].strip().rstrip(";").strip()
            if re.match(r"[\w$.]+:$", line):
                labels[line[:-1]] = len(code.lines)
            elif line and not line.startswith((".", "#", "{", "}")):
                code.lines.append(line)
        for at, line in enumerate(code.lines):
            jump = branch.search(line)
            after = [] if re.match(r"(?:@\S+\s+)?(?:ret|s_endpgm)\b", line) else [at + 1]
            if jump:
                target = labels[jump[1]]
                after = [at + 1, target] if re.search(conditional, line) else [target]
            code.following.append([to for to in after if to < len(code.lines)])
        code.previous = [[] for _ in code.lines]
        for at, after in enumerate(code.following):
            for to in after:
                code.previous[to].append(at)
        return code

    def find(self, pattern: str) -> list[int]:
        return [at for at, line in enumerate(self.lines) if re.search(pattern, line)]

    def nearest(self, at: int, step: int, pattern: str, between: str) -> bool:
        """Whether `at` is next to a wait (`between`), and the wait next to a match of `pattern`."""
        waits = at + step
        if not (0 <= waits < len(self.lines) and re.search(between, self.lines[waits])):
            return False
        beyond = waits + step
        return 0 <= beyond < len(self.lines) and bool(re.search(pattern, self.lines[beyond]))

    def reach(self, at: int, neighbours: Sequence[Sequence[int]], stop: Test) -> list[int]:
        """The first instructions on all paths from `at` for which `stop` is true."""
        return self._walk(at, neighbours, stop)[0]

    def search(
        self,
        at: int,
        neighbours: Sequence[Sequence[int]],
        stop: Test,
        bad: Test,
        words: str,
        must_stop: bool = False,
    ) -> list[str]:
        """The faults on the paths from `at` to `stop`: bad instructions, and paths without a
        stop."""
        _, passed, open_ended = self._walk(at, neighbours, stop)
        faults = [f"{words}: {self.lines[p]}" for p in passed if bad(self.lines[p])]
        if must_stop and open_ended:
            faults.append(f"no barrier beside {self.lines[at]}")
        return faults

    def _walk(
        self, at: int, neighbours: Sequence[Sequence[int]], stop: Test
    ) -> tuple[list[int], list[int], bool]:
        stops: list[int] = []
        passed: list[int] = []
        seen: set[int] = set()
        ahead = list(neighbours[at])
        open_ended = not ahead
        while ahead:
            here = ahead.pop()
            if here in seen:
                continue
            seen.add(here)
            if stop(self.lines[here]):
                stops.append(here)
                continue
            passed.append(here)
            ahead += neighbours[here]
            open_ended |= not neighbours[here]
        return stops, passed, open_ended
