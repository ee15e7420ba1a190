"""The study of C3: the published ladder from one fitted number, rules near the best, a real run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from weft.benchmarks import c3 as bench
from weft.errors import Unsupported
from weft.machine import load
from weft.strategy import NAMES
from weft.study.c3 import rules
from weft.study.c3.cases import C3Case, kind_of, llama
from weft.study.c3.findings import Study
from weft.study.c3.measured import HostCase, measure
from weft.study.c3.simulated import study, timeline

MI300X = load("mi300x")


@pytest.fixture(scope="module")
def found() -> Study:
    return study(MI300X)


def test_there_are_thirty_scenarios_of_every_kind(found: Study) -> None:
    assert len(found.scenarios) == len(llama()) == 30
    assert len({scenario.case.label for scenario in found.scenarios}) == 30
    kinds = Counter(scenario.kind for scenario in found.scenarios)
    assert min(kinds["G-long"], kinds["GC-equal"], kinds["C-long"]) >= 6
    assert {case.num_bytes for case in llama()} >= {896 << 20, 3328 << 20}
    for scenario in found.scenarios:
        assert scenario.bound == ("compute" if scenario.case.id.startswith("cb") else "memory")
        assert 0.25 <= scenario.compute / scenario.communication <= 4.0
        assert scenario.serial == pytest.approx(scenario.compute + scenario.communication, rel=0.02)


def test_kinds_are_by_fifteen_percent() -> None:
    assert kind_of(1.0, 1.0) == kind_of(1.14, 1.0) == kind_of(1.0, 1.14) == "GC-equal"
    assert kind_of(1.16, 1.0) == "G-long"
    assert kind_of(1.0, 1.16) == "C-long"


def test_the_ladder_is_near_the_published_one(found: Study) -> None:
    means = {mean.name: mean.percent_of_ideal for mean in found.means()}
    assert list(means) == [name for name in NAMES if name != "serial"]
    for name, known in found.published.items():
        assert abs(means[name] - known) <= bench.NEAR, name
    assert means["concurrent"] < means["partitioned"] < means["dma"] < means["dma+trimmed"]
    assert found.mean("dma+trimmed").most == pytest.approx(1.67, abs=0.06)
    assert found.mean("concurrent").speedup == pytest.approx(1.13, abs=0.02)


def test_units_are_worth_what_was_measured(found: Study) -> None:
    assert all(check.ok for check in bench._units(found))
    assert found.units is not None
    memory = dict(zip(found.units.taken, found.units.gemms["memory"], strict=True))
    assert 0.9 <= memory[8] < 1.0


def test_rules_are_near_the_best_of_their_sweeps(found: Study) -> None:
    worst = {rule.question: rule.worst_loss for rule in found.rules()}
    assert list(worst) == [
        "what to launch first",
        "units to reserve",
        "units to trim",
        "which strategy",
    ]
    assert max(worst.values()) < 0.02


def test_engines_pay_where_the_message_is_large() -> None:
    """ConCCL: below some 32 MB commanding the engines takes longer than the bytes."""
    for kind in ("all_gather", "all_to_all"):
        assert 8 << 20 <= rules.dma_pays_from(MI300X, kind, 8) <= 64 << 20
    small = C3Case("small", 256, 1024, 1024, "all_gather", 64 << 10).operation(8, "bfloat16")
    assert rules.choose(MI300X, small).engine == "cores"
    large = C3Case("large", 4096, 8192, 28672, "all_gather", 1 << 30).operation(8, "bfloat16")
    assert rules.choose(MI300X, large).engine == "dma"


def test_slowdowns_are_apart(found: Study) -> None:
    concurrent, dma = found.mean("concurrent"), found.mean("dma")
    assert concurrent.gemm_slowdown < 1.2 < 1.5 < concurrent.collective_slowdown
    assert dma.gemm_slowdown < found.mean("prioritized").gemm_slowdown


def test_plain_data(found: Study) -> None:
    data = json.loads(json.dumps(found.to_json()))
    assert [s["name"] for s in data["strategies"]] == [n for n in NAMES if n != "serial"]
    assert data["strategies"][4]["published_percent_of_ideal"] == 66
    assert len(data["scenarios"]) == 30
    first = data["scenarios"][0]
    assert {s["name"] for s in first["strategies"]} == set(NAMES) - {"serial"}
    assert len(first["sweeps"]["partitioned"]) == len(rules.partitions(MI300X))
    assert first["rules"][0]["question"] == "what to launch first"


def test_other_machines_and_worlds_and_timelines() -> None:
    some = llama()[:2]
    for name in ("h100", "b200"):
        assert study(load(name), some).published == {}
    two = study(MI300X, some, world=2)
    assert two.world == 2
    drawn = timeline(MI300X, two.scenarios[0], "dma", 2)
    assert drawn.seconds == pytest.approx(two.scenarios[0].outcomes["dma"].seconds, rel=1e-6)
    with pytest.raises(Unsupported, match="2 or more"):
        study(MI300X, some, world=1)
    with pytest.raises(Unsupported, match="2 or more"):
        study(MI300X, some, world=9)
    with pytest.raises(Unsupported, match="not simulated"):
        timeline(MI300X, two.scenarios[0], "serial", 2)


def test_without_interference_the_ladder_is_too_kind() -> None:
    calm = replace(MI300X, links=replace(MI300X.links, interference=0.0))
    assert study(calm).mean("dma").percent_of_ideal > 90


def test_measured_here() -> None:
    """Small and few: that it runs, and that its numbers hang together; `weft bench c3` has bars."""
    case = C3Case("tiny", 96, 96, 96, "all_to_all", 1 << 16)
    progress = []
    found = measure(
        [HostCase(case, 1.0)], repeat=2, report=lambda share, text: progress.append(share)
    )
    (scenario,) = found.scenarios
    assert found.measured
    assert scenario.compute > 0
    assert scenario.communication > 0
    assert {"concurrent", "prioritized", "dma"} <= set(scenario.outcomes)
    for outcome in scenario.outcomes.values():
        assert outcome.speedup > 0
        assert outcome.gemm_slowdown > 0
        assert outcome.collective_slowdown > 0
    assert set(scenario.outcomes).isdisjoint(scenario.refused)
    assert progress == sorted(progress)
    assert len(found.means()) == len(scenario.outcomes)


def test_bad_calls() -> None:
    with pytest.raises(Unsupported, match="2 ranks or more"):
        measure(world=1)
    with pytest.raises(Unsupported, match="at least 1 round"):
        measure(repeat=0)
