"""Soak: a seed repeats what it draws, what is wrong is a fault, and a short one is right."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from weft.cli import app, find_commands
from weft.errors import Unsupported
from weft.measure.soak import burst, soaking, subjects
from weft.measure.soak.places import PLACES, places_of

SEED = 13
"""With this, a life has three ranks, one burst, and then a kill."""


def nothing(share: float, text: str) -> None:
    """A report that goes nowhere."""


def test_a_short_soak(monkeypatch):
    monkeypatch.setattr(soaking, "CALLS", 20)
    found = soaking.soak(0.1, places_of("host"), False, 11, nothing)
    assert found.right, found.faults
    assert found.lives == {"host": 1}


@pytest.mark.parametrize("place", ["host", "flat"])
def test_a_life_with_a_kill(monkeypatch, place):
    monkeypatch.setattr(soaking, "CALLS", 20)
    found = soaking.Findings(SEED)
    soaked = soaking._Soaked(found, PLACES[place], random.Random(SEED), lambda: None)
    soaked.live(True, lambda: 1.0)
    assert found.right, found.faults
    assert found.kills == 1
    assert max(found.named_after) < soaking.SOON
    assert len(found.again_after) == 1


def test_a_seed_repeats_a_draw_and_ranks_differ():
    for seed in range(50):
        first, second = (subjects.Draw(seed, 3, subjects.DTYPES) for _ in range(2))
        assert (first.m, first.n, first.k, first.splits) == (
            second.m,
            second.n,
            second.k,
            second.splits,
        )
        assert torch.equal(first.values(1, 0, 40), second.values(1, 0, 40))
        assert not torch.equal(first.values(1, 0, 40), first.values(2, 0, 40))


def test_every_function_agrees_with_plain_torch_on_one_rank(ranks):
    """The references by themselves: on one rank there is nothing to communicate."""
    ranks(1).run(alone)


def alone() -> None:
    groups = burst.Groups("cpu")
    for name, subject in subjects.subjects().items():
        for seed in range(6):
            draw = subjects.Draw(seed, 1, subject.dtypes)
            schedule = subject.schedules(1)[0]
            result = subject.call(draw, 0, None, schedule)
            assert subjects.right(subject, draw, 0, result), (name, seed)
            if result.numel():
                assert not subjects.right(subject, draw, 0, result + 1), (name, seed)
    for group in groups.threads:
        dist.destroy_process_group(group)


def wrong_results(seed: int) -> list[str]:
    """A burst in which plain torch is said to give something else."""
    usual = dict(subjects._subjects)
    try:
        for name, subject in usual.items():
            other = lambda d, r, of=subject.expected: of(d, r) + 1  # noqa: E731
            subjects._subjects[name] = replace(subject, expected=other)
        return burst.burst(burst.Groups("cpu"), seed, 10, "whole").wrong
    finally:
        subjects._subjects.update(usual)


def test_a_wrong_result_is_found(ranks):
    for found in ranks(2).run(wrong_results, 5):
        assert found
        assert "than plain torch in call" in found[0]


class Silent:
    """A life whose ranks give these answers."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.ranks = [0, 1]

    def tell(self, *_):
        """Nothing is done."""

    def signal(self, *_):
        return 0.0

    def hear(self, *_):
        return self.answers.pop(0)

    def end(self):
        """There is nothing to end."""


class Lazy(Silent):
    """A life whose ranks open files and threads when they use groups for the first time, and keep
    plans of calls."""

    def __init__(self):
        super().__init__()
        self.told = []

    def tell(self, what, *arguments):
        self.told.append(arguments)

    def hear(self, *_):
        opened, plans = len({kind for *_, kind in self.told}), len(set(self.told))
        kept = burst.Usage((1 << 30) + plans * (20 << 20), 10 + 18 * opened, 5 + 22 * opened)
        return {0: burst.Said(usage=kept)}


def test_what_is_opened_and_kept_once_is_no_growth(monkeypatch):
    monkeypatch.setattr(soaking, "Life", lambda place, world: Lazy())
    monkeypatch.setattr(soaking.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(soaking, "_pressure", lambda wanted, found: contextlib.nullcontext())
    for seed in range(40):
        found = soaking.Findings(seed)
        soaked = soaking._Soaked(found, PLACES["flat"], random.Random(seed), lambda: None)
        soaked.live(False, lambda: 1.0)
        assert found.faults == []
        assert len(soaked._life.told) == soaking.BURSTS


def life(monkeypatch, *answers) -> tuple[soaking._Soaked, soaking.Findings]:
    monkeypatch.setattr(soaking, "Life", lambda place, world: Silent(*answers))
    found = soaking.Findings(0)
    return soaking._Soaked(found, PLACES["host"], random.Random(1), lambda: None), found


def said(lost: int | None, last: float) -> burst.Said:
    return burst.Said(error="PeerLost: gone", lost=lost, last=last)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (said(None, 0.1), "was killed, and rank 0 raised PeerLost: gone"),
        (said(7, 0.1), "was killed, and rank 0 raised PeerLost: gone"),
        (None, "rank 0 died or gave no answer"),
    ],
)
def test_a_kill_that_is_not_named_is_a_fault(monkeypatch, answer, fault):
    soaked, found = life(monkeypatch, {0: answer})
    soaked._with_a_kill()
    assert fault in found.faults[0]


def test_a_kill_that_is_named_late_is_a_fault(monkeypatch):
    late = soaking.SOON + 1
    soaked, found = life(monkeypatch, {0: said(0, late), 1: said(1, late)})
    soaked._with_a_kill()
    assert any("took 6.0 s to name" in fault for fault in found.faults)


def test_growth_is_a_fault(monkeypatch):
    soaked, found = life(monkeypatch)
    small, large = burst.Usage(1 << 30, 20, 5), burst.Usage((1 << 30) + (80 << 20), 30, 9)
    middle, end = burst.Said(usage=small), burst.Said(usage=large)
    soaked._compare({0: middle}, {0: end})
    for what in ("resident", "10 files", "4 threads"):
        assert any(what in fault for fault in found.faults), what
    assert not found.right


def test_the_command(monkeypatch):
    find_commands()
    findings = soaking.Findings(3, seconds=2.0)
    findings.calls["all_gather"] = 5
    monkeypatch.setattr("weft.cli.soak.run", lambda *_: findings)
    told = CliRunner().invoke(app, ["soak", "--json"])
    assert told.exit_code == 0
    assert json.loads(told.stdout)["verdict"] == "All 5 calls in 2 s were right (seed 3)."
    findings.faults.append("life 1: something was wrong")
    told = CliRunner().invoke(app, ["soak"])
    assert told.exit_code == 1
    assert "something was wrong" in told.stdout
    assert told.stdout.splitlines()[-1] == "1 fault in 5 calls; seed 3 repeats them."


def test_every_operator_is_called():
    """Those that are left out are made by the gradients of others."""
    assert subjects.left_out() == ["embedding_gradient", "gather_contract"]


def test_fabrics_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_LOOM_CACHE", str(tmp_path))  # where nothing is built
    assert [place.name for place in places_of("all")] == ["host", "flat", "two-level"]
    assert [place.name for place in places_of("loom,host")] == ["loom", "host"]
    with pytest.raises(Unsupported, match="did you mean host"):
        places_of("hst")
