"""Losses say where the time went, and add up to it."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from weft.machine import load
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule
from weft.simulate import losses, run

LARGE = AllGatherMatmul.of(32768, 2048, 8192, 8, "bfloat16")  # communication takes as long
THIN = AllGatherMatmul.of(32768, 512, 8192, 8, "bfloat16")  # communication takes longer
WIDE = AllGatherMatmul.of(16384, 8192, 8192, 8, "bfloat16")  # compute takes longer


@pytest.mark.parametrize("machine", ["mi300x", "h100"])
@pytest.mark.parametrize("operation", [LARGE, THIN, WIDE], ids=["large", "thin", "wide"])
def test_losses_add_up_to_overlapped_minus_ideal(operation: AllGatherMatmul, machine: str) -> None:
    node = load(machine)
    compute = run(operation.compute_only().lower(Schedule.parse("serial")), node)
    for communication in (0.3 * compute.seconds, 3.0 * compute.seconds):
        ideal = max(compute.seconds, communication)
        for schedule in Schedule.space(operation):
            overlapped = run(operation.lower(schedule), node)
            lost = losses(overlapped, compute, communication)
            assert lost.total == pytest.approx(overlapped.seconds - ideal, rel=1e-9, abs=1e-12)
            assert lost.exposed_communication >= 0.0
            assert lost.hidden <= 0.0
            assert sum(asdict(lost).values()) == pytest.approx(lost.total)


def test_each_loss_has_its_cause() -> None:
    node = load("mi300x")
    compute = run(LARGE.compute_only().lower(Schedule.parse("serial")), node)

    def of(name: str) -> dict[str, float]:
        return asdict(losses(run(LARGE.lower(Schedule.parse(name)), node), compute, 0.0))

    serial = of("serial@dma")
    assert serial["exposed_communication"] > 0.99 * sum(serial.values())
    assert serial["decomposition"] == pytest.approx(0.0, abs=1e-12)
    assert of("shard-p2p@dma")["exposed_communication"] > 3 * serial["exposed_communication"]
    assert of("hetero-unfused-1d@dma")["decomposition"] > of("hetero-fused-1d@dma")["decomposition"]
    assert of("hetero-unfused-1d@dma")["launch"] > of("hetero-fused-1d@dma")["launch"]
    assert of("hetero-fused-1d@cores")["contention"] > of("hetero-fused-1d@dma")["contention"]


def test_remote_operands_over_a_slow_link_are_exposed_communication() -> None:
    disturbed = load("mi300x")
    node = disturbed.without_contention()
    compute = run(LARGE.compute_only().lower(Schedule.parse("serial")), node)
    lost = losses(run(LARGE.lower(Schedule.parse("shard-p2p@direct")), node), compute, 0.0)
    assert lost.exposed_communication > 0.8 * lost.total
    more = losses(run(LARGE.lower(Schedule.parse("shard-p2p@direct")), disturbed), compute, 0.0)
    assert more.exposed_communication == pytest.approx(lost.exposed_communication)
    assert more.contention > 0.2 * lost.exposed_communication  # its links are slowed by 0.21
    fast = replace(node, links=replace(node.links, bandwidth=1e12, total_bandwidth=7e12))
    lost = losses(run(LARGE.lower(Schedule.parse("shard-p2p@direct")), fast), compute, 0.0)
    assert lost.exposed_communication == pytest.approx(0.0, abs=1e-6)
