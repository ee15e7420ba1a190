"""`weft judge`: the same scenarios for the same seed, and figures that add up."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from weft import Unsupported
from weft.machine import load
from weft.report.judge_page import judgement_page
from weft.schedule import Schedule
from weft.study import judge_host
from weft.study.judgement import COLUMNS, INNER, ROWS, Judgement, Verdict, draw, judge, with_links

KEYS = {
    "exact",
    "within_2_percent",
    "within_10_percent",
    "mean_regret",
    "worst_regret",
    "slower_than_serial",
}


def test_a_seed_draws_the_same_and_another_seed_others():
    first = [draw(1, number) for number in range(50)]
    assert first == [draw(1, number) for number in range(50)]
    assert not set(first) & {draw(2, number) for number in range(50)}
    assert {drawn.operation.world for drawn in first} <= set(range(2, 9))
    for drawn in first:
        m, (n,), k = drawn.operation.m, drawn.operation.columns[0], drawn.operation.k
        assert ROWS[0] * 0.9 <= m <= ROWS[1] * 1.1
        assert COLUMNS[0] * 0.5 <= n * drawn.operation.world <= COLUMNS[1] * 1.1
        assert INNER[0] * 0.9 <= k <= INNER[1] * 1.1
    assert all(draw(1, number, most=3).operation.world <= 3 for number in range(20))
    host = [judge_host.draw(1, number, 2) for number in range(60)]
    assert min(d.operation.m for d in host) < 8
    assert max(d.operation.m for d in host) > 1024


def test_links_scale_with_all_that_drives_them():
    machine = load("mi300x")
    fast = with_links(machine, 2.0)
    assert fast.links.bandwidth == 2 * machine.links.bandwidth
    assert fast.engines.bandwidth == 2 * machine.engines.bandwidth
    assert fast.cores.protocols[0].bandwidth == 2 * machine.cores.protocols[0].bandwidth
    assert fast.compute == machine.compute
    with pytest.raises(Unsupported, match="0 times"):
        with_links(machine, 0)


def judgement_of(times: list[dict[str, float]], chosen: str) -> Judgement:
    verdicts = []
    for number, seconds in enumerate(times):
        choices = dict.fromkeys(("heuristic", "fixed", "paper"), Schedule.parse(chosen))
        known = {Schedule.parse(name): time for name, time in seconds.items()}
        verdicts.append(Verdict(draw(1, number), choices, known))
    return Judgement("here", 1, 0.01, tuple(verdicts))


def test_scores_are_what_they_say():
    """Four scenarios worked out by hand: a hit, 1 % off, 9 % off, and 50 % slower than serial."""
    times = [
        {"serial@dma": 3.0, "hetero-fused-1d@dma": 1.0, "adaptive@dma": 2.0},
        {"serial@dma": 3.0, "hetero-fused-1d@dma": 1.01, "adaptive@dma": 1.0},
        {"serial@dma": 3.0, "hetero-fused-1d@dma": 1.09, "adaptive@dma": 1.0},
        {"serial@dma": 1.0, "hetero-fused-1d@dma": 1.5, "adaptive@dma": 2.0},
    ]
    judgement = judgement_of(times, "hetero-fused-1d@dma")
    score = judgement.score("heuristic")
    assert (score.exact, score.within_2_percent, score.within_10_percent) == (25.0, 50.0, 75.0)
    assert score.mean_regret == pytest.approx((0 + 1 + 9 + 50) / 4)
    assert score.worst_regret == pytest.approx(50.0)
    assert score.slower_than_serial == 1
    fixed = judgement.score("fixed")  # without adaptive, the first three are hits
    assert (fixed.exact, fixed.worst_regret) == (75.0, pytest.approx(50.0))
    assert judgement.score("paper").exact == 100.0  # it is the only one of the four here


def test_the_page_names_the_misses(tmp_path):
    times = [{"serial@dma": 1.0, "hetero-fused-1d@dma": 1.5}]
    page = judgement_page(tmp_path / "page.html", judgement_of(times, "hetero-fused-1d@dma"))
    text = page.read_text()
    assert "50.0 %" in text
    assert "hetero-fused-1d@dma" in text
    assert "http://" not in text.split("<script>")[0]
    none = judgement_of([{"serial@dma": 1.0, "hetero-fused-1d@dma": 0.5}], "hetero-fused-1d@dma")
    assert "No choice is more than 2 %" in judgement_page(tmp_path / "p.html", none).read_text()


def test_a_small_judgement_is_well_above_the_bars_of_a_large_one():
    judgement = judge(load("h100"), 6, 91, processes=1)
    assert judgement.score("heuristic").within_2_percent >= 5 / 6 * 100
    assert judgement.score("heuristic").slower_than_serial == 0
    with pytest.raises(Unsupported, match="at least 1"):
        judge(load("h100"), 0, 1)
    machine = load("h100")
    with pytest.raises(Unsupported, match="one device"):
        judge(replace(machine, links=replace(machine.links, world=1)), 1, 1)


def test_the_command_prints_json_with_the_promised_keys(tmp_path):
    command = ["judge", "--machine", "h100", "--random", "1", "--seed", "4", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", "from weft.cli import main; main()", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = json.loads(done.stdout)
    assert told["scenarios"] == len(told["verdicts"]) == 1
    assert told["verdicts"][0]["regret"] >= 0.0
    for kind in ("heuristic", "fixed", "paper"):
        assert set(told[kind]) == KEYS
