"""Ways to carry out a collective: times that agree with the closed form, the published order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import Unsupported
from weft.machine import HostCores, load, load_cluster
from weft.plan.collective import UNROOTED, Collective
from weft.plan.command_variants import CommandedCollective, Variant
from weft.plan.verify import verify
from weft.report.collective_report import verdict, why
from weft.simulate.commanded import commanded_seconds
from weft.simulate.cost import dma_variants
from weft.study import collective_ways
from weft.study.collective_comparison import compare
from weft.study.collective_ways import find_way, register, ways

NODE = load_cluster("mi300x").with_nodes(1)


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("kib", [32, 512, 4096, 65536, 2**20])
def test_simulated_times_agree_with_the_closed_form(kind, kib):
    machine, operation = load("mi300x"), Collective.even(kind, kib * 1024, 8)
    for (command, prelaunch), seconds in dma_variants(machine, kind, kib * 1024, 8).items():
        plan = CommandedCollective(operation, Variant(command, prelaunch)).lower()
        assert commanded_seconds(plan, machine) == pytest.approx(seconds, rel=0.15)


def test_the_best_variant_grows_with_the_size():
    """As published: b2b for small messages, bcst or swap between, pcpy for large ones."""

    def best(kind, *kib):
        found = compare(NODE, kind, [1024 * size for size in kib], 8)
        engines = [times for times in found.found if times.way.by == "engines"]
        return [
            min(engines, key=lambda times: times.seconds[index]).way.name
            for index in range(len(kib))
        ]

    gathers = best("all_gather", 64, 512, 4096, 65536)
    assert gathers == ["b2b+prelaunch", "bcst+prelaunch", "pcpy+prelaunch", "pcpy+prelaunch"]
    exchanges = best("all_to_all", 8, 1024, 65536)
    assert exchanges[1:] == ["swap+prelaunch", "pcpy+prelaunch"]


def test_chunks_let_sums_overlap_copies():
    machine, operation = load("mi300x"), Collective.even("all_reduce", 2**26, 8)
    one, four = (
        commanded_seconds(CommandedCollective(operation, Variant("pcpy", True), n).lower(), machine)
        for n in (1, 4)
    )
    assert four < 0.95 * one
    way = find_way("pcpy+prelaunch")
    assert way.seconds([operation], NODE) == [four]
    plan = way.plan(operation, NODE)
    verify(plan)
    assert plan.operation.chunks == 4


@pytest.mark.parametrize("kind", UNROOTED)
def test_every_way_takes_longer_for_more_and_never_less_than_its_fixed_cost(kind):
    found = compare(NODE, kind, [2**14, 2**20, 2**26, 2**32], 8)
    assert {times.way.by for times in found.found} == {"engines", "cores", "links"}
    for times in found.found:
        assert list(times.seconds) == sorted(times.seconds), times.way.name
        assert 0 < times.fixed <= times.seconds[0] * 1.001
    assert {name for name, _ in found.refused} | {t.way.name for t in found.found} == {
        way.name for way in ways()
    }
    for index in range(4):
        best = found.best(index)
        assert best.way.by != "links"
        assert best.seconds[index] == min(t.seconds[index] for t in found.candidates())
        assert best.way.name in why(found, index)
        assert best.way.name in verdict(found)


def test_on_several_nodes_only_algorithms_are_left():
    two = load_cluster("mi300x").with_nodes(2)
    found = compare(two, "all_gather", [2**26], 16)
    assert {times.way.by for times in found.found} == {"links"}
    assert {"hierarchical", "mixed"} <= {times.way.name for times in found.found}
    assert "devices of one node" in dict(found.refused)["pcpy"]


def test_a_way_is_one_registration(monkeypatch):
    monkeypatch.setattr(collective_ways, "_ways", dict(collective_ways._ways))

    class Instant:
        name, by, source = "instant", "cores", "measured"

        def impossible(self, collective, place):
            return None

        def seconds(self, collectives, place):
            return [1e-9] * len(collectives)

        def plan(self, collective, place):
            return None

    register(Instant())
    assert compare(NODE, "all_gather", [2**20], 8).best(0).way.name == "instant"
    with pytest.raises(Unsupported, match="did you mean instant"):
        find_way("instand")


def test_the_channel_is_measured_on_a_host():
    machine = replace(
        load("mi300x"), name="here", host=HostCores(2, 0.0, 2e-3, 16384, 0.0, 0.0, 0.0)
    )
    found = compare(replace(NODE, machine=machine), "all_gather", [2**14, 2**24], 2)
    (channel,) = found.found
    assert (channel.way.name, channel.way.source) == ("channel", "measured")
    assert 0 < channel.seconds[0] < channel.seconds[1] < 10
    assert "the channel serves all sizes" in dict(found.refused)["pcpy"]
