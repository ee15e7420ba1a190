"""Soaks for a given time: lives of ranks, what is done to them, and what was found.

A life has ranks on one fabric, and makes bursts of calls. In some bursts a rank is stopped for a
while, or memory is short; with kills, a rank is killed in one burst, the others must all name it
soon, and then go on in a new group. Everything but the moments at which it happens follows from the
seed.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.measure.launch import Report
from weft.measure.soak.burst import Said, Usage
from weft.measure.soak.life import DEADLINE, Life
from weft.measure.soak.places import FabricPlace

CALLS = 60
"""Calls of a burst."""
KINDS = ("all", "whole", "threads")
"""Kinds of bursts, see `burst`."""
BURSTS = 12
"""Bursts of a life in which nobody is killed."""
SOON = 5.0
"""The longest that a survivor may take to name a rank that was killed, in seconds: a twentieth is
usual, and a busy machine may take long."""
MOST_GROWTH = Usage(48 << 20, 2, 2)
"""How much more a rank may hold at the end of a life than in its middle."""


@dataclass
class Findings:
    """What a soak found."""

    seed: int
    calls: Counter[str] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    stops: int = 0
    pressures: int = 0
    faults: list[str] = field(default_factory=list)
    named_after: list[float] = field(default_factory=list)
    """Seconds from each kill until its last survivor raised."""
    again_after: list[float] = field(default_factory=list)
    """Seconds from each kill to the first right call of the survivors in a new group."""
    growth: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    """The largest growth of a rank in the second half of its life."""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return not self.faults and bool(self.calls)


def soak(
    seconds: float, places: Sequence[FabricPlace], kill: bool, seed: int, report: Report
) -> Findings:
    """Soaks at least so long, and until the burst that is under way has ended."""
    for place in places:
        place.prepare(report)
    found = Findings(seed)
    began = time.monotonic()

    def left() -> float:
        return began + seconds - time.monotonic()

    number = 0
    while left() > 0 and not found.faults:
        place = places[number % len(places)]
        number += 1

        def tell(place: FabricPlace = place) -> None:
            calls = sum(found.calls.values())
            report(1 - max(0.0, left()) / seconds, f"{place.name}, {calls} calls")

        _Soaked(found, place, random.Random(f"{seed} {number}"), tell).live(kill, left)
    found.seconds = time.monotonic() - began
    return found


class _Soaked:
    """One life."""

    def __init__(
        self, found: Findings, place: FabricPlace, choose: random.Random, tell: Callable[[], None]
    ) -> None:
        self._found, self._place, self._choose, self._tell = found, place, choose, tell
        world = choose.choice(place.worlds)
        self._where = f"life {sum(found.lives.values()) + 1} ({place.name}, {world} ranks)"
        self._life = Life(place, world)
        found.lives[place.name] += 1

    def live(self, kill: bool, left: Callable[[], float]) -> None:
        choose = self._choose
        try:
            if not self._heard(self._life.hear(60.0)):
                return
            if kill and choose.random() < 0.8:
                for _ in range(choose.randrange(4)):
                    if not self._burst(*self._draw()) or left() <= 0:
                        return
                self._with_a_kill()
                return
            # The second half repeats the calls of the first, in which groups are opened and plans
            # are kept. So growth in the second half is a leak.
            half = [self._draw() for _ in range(BURSTS // 2)]
            held: list[dict[int, Said | None]] = []
            for kind, seed in half * 2:
                if not self._burst(kind, seed, held) or left() <= 0:
                    return
            self._compare(held[len(half) - 1], held[-1])
        finally:
            self._life.end()

    def _draw(self) -> tuple[str, int]:
        """The kind and the seed of a burst."""
        return self._choose.choice(("all", *KINDS)), self._choose.randrange(2**31)

    def _burst(
        self, kind: str, seed: int, held: list[dict[int, Said | None]] | None = None
    ) -> bool:
        """One burst in which nobody is killed; whether all was right."""
        self._tell()
        choose, life = self._choose, self._life
        life.tell("burst", seed, CALLS, kind)
        with _pressure(choose.random() < 0.15, self._found):
            if choose.random() < 0.2:
                rank = choose.choice(life.ranks)
                time.sleep(choose.random() * 0.1)
                life.signal(rank, signal.SIGSTOP)
                time.sleep(choose.random() * 0.4)
                life.signal(rank, signal.SIGCONT)
                self._found.stops += 1
            said = life.hear(4 * DEADLINE)
        if held is not None:
            held.append(said)
        return self._heard(said)

    def _heard(self, said: dict[int, Said | None]) -> bool:
        """Whether all ranks did all that they were told."""
        found = self._found
        for rank, one in said.items():
            if one is None:
                found.faults.append(f"{self._where}: rank {rank} died or gave no answer")
                continue
            self._count(one)
            if one.error:
                found.faults.append(f"{self._where}: rank {rank} raised {one.error}")
        return not found.faults

    def _count(self, said: Said) -> None:
        self._found.calls += said.calls
        self._found.faults += [f"{self._where}: {wrong}" for wrong in said.wrong]

    def _with_a_kill(self) -> None:
        """A burst in which a rank is killed. All others must name it soon, and then go on."""
        self._tell()
        choose, life, found = self._choose, self._life, self._found
        victim = choose.choice(life.ranks)
        kind = choose.choice(("whole", "threads"))
        life.tell("burst", choose.randrange(2**31), 1_000_000, kind)
        # From the first call, in which the fabric is opened, to the middle of many.
        time.sleep(choose.choice((0.0, 0.02, 0.2, 1.0)) * choose.random())
        stopped = choose.random() < 0.3
        if stopped:
            life.signal(victim, signal.SIGSTOP)
            time.sleep(choose.random() * 0.2)
        killed = life.signal(victim, signal.SIGKILL)
        found.kills += 1
        said = life.hear(4 * DEADLINE, victim)
        for rank, one in said.items():
            if one is None:
                found.faults.append(f"{self._where}: rank {rank} died or gave no answer")
                return
            self._count(one)
            if one.lost != victim:
                named = one.error or "nothing"
                found.faults.append(
                    f"{self._where}: rank {victim} was killed, and rank {rank} raised {named}"
                )
            took = one.last - killed
            found.named_after.append(took)
            if took > SOON:
                found.faults.append(
                    f"{self._where}: rank {rank} took {took:.1f} s to name rank {victim}, "
                    "which was killed"
                )
        if found.faults or len(life.ranks) < 2:
            return
        life.form_again()
        if not self._heard(life.hear(60.0)):
            return
        life.tell("burst", choose.randrange(2**31), CALLS, "all")
        again = life.hear(4 * DEADLINE)
        if self._heard(again):
            first = max(one.first for one in again.values() if one is not None)
            found.again_after.append(first - killed)

    def _compare(self, middle: dict[int, Said | None], end: dict[int, Said | None]) -> None:
        """Whether a rank holds more at the end of its life than in the middle."""
        found = self._found
        for rank, last in end.items():
            first = middle[rank]
            if first is None or last is None or first.usage is None or last.usage is None:
                continue
            grown = Usage(
                last.usage.resident - first.usage.resident,
                last.usage.files - first.usage.files,
                last.usage.threads - first.usage.threads,
            )
            found.growth = Usage(
                max(found.growth.resident, grown.resident),
                max(found.growth.files, grown.files),
                max(found.growth.threads, grown.threads),
            )
            for name in ("resident", "files", "threads"):
                if getattr(grown, name) > getattr(MOST_GROWTH, name):
                    found.faults.append(
                        f"{self._where}: rank {rank} grew by {getattr(grown, name)} {name} in the "
                        "second half of its life"
                    )


class _pressure:  # noqa: N801
    """A block in which memory is short: another thread fills and frees a part of what is left."""

    def __init__(self, wanted: bool, found: Findings) -> None:
        self._wanted = wanted
        found.pressures += wanted
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, daemon=True)

    def __enter__(self) -> None:
        if self._wanted:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._wanted:
            self._thread.join()

    def _fill(self) -> None:
        while not self._stop.wait(0.05):
            with open("/proc/meminfo") as file:
                free = next(int(line.split()[1]) for line in file if "MemAvailable" in line)
            taken = np.empty(min(free << 10 >> 2, 1 << 30), np.uint8)
            taken[::4096] = 1
