"""The section of docs/fidelity.md about C3: simulated and published results per strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.machine import Machine, load
from weft.study.c3 import simulated
from weft.study.c3.findings import Study

INTERFERENCES = (0.0, 0.1, 0.3)
"""The values of `links.interference` to try, beside the machine's own."""


def section() -> str:
    """Simulates the scenarios and writes the section."""
    machine = load(simulated.PUBLISHED_ON)
    study = simulated.study(machine)
    tried: dict[float, Study] = {
        share: simulated.study(replace(machine, links=replace(machine.links, interference=share)))
        for share in INTERFERENCES
        if share != machine.links.interference
    }
    tried[machine.links.interference] = study
    names = [mean.name for mean in study.means()]
    text = Path(__file__).with_suffix(".md").read_text("utf-8")
    return text.format(
        ladder=_ladder(study),
        traffic=machine.cores.memory_bytes_per_byte,
        trimmed=study.mean("dma+trimmed").most,
        names=" | ".join(names),
        rule="| --- " * (len(names) + 2) + "|",
        what_if=_what_if(tried, names),
        starved=100.0 * _starved(study),
        alike=_alike(machine),
    )


def _alike(machine: Machine) -> str:
    """The core-driven strategies, if interference depended on the bytes moved, not on who moves
    them."""
    cores = machine.cores
    share = machine.links.interference / cores.memory_bytes_per_byte
    calmer = simulated.study(replace(machine, links=replace(machine.links, interference=share)))
    names = ("prioritized", "partitioned", "prioritized+partitioned")
    return ", ".join(f"{calmer.mean(name).percent_of_ideal:.0f} %" for name in names)


def _ladder(study: Study) -> str:
    lines = [
        "| strategy | simulated | published | GEMM | collective | most |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mean in study.means():
        lines.append(
            f"| {mean.name} | {mean.percent_of_ideal:.0f} % | "
            f"{study.published[mean.name]:.0f} % | {mean.gemm_slowdown:.2f}x | "
            f"{mean.collective_slowdown:.2f}x | {mean.most:.2f}x |"
        )
    return "\n".join(lines)


def _what_if(tried: Mapping[float, Study], names: Sequence[str]) -> str:
    lines = []
    for share, study in sorted(tried.items()):
        percents = (f"{study.mean(name).percent_of_ideal:.0f} %" for name in names)
        lines.append(f"| {share:g} | {' | '.join(percents)} | {study.mean('dma').most:.2f}x |")
    return "\n".join(lines)


def _starved(study: Study) -> float:
    """The mean share of a GEMM's time in which the collective after it has no compute units."""
    shares = []
    for scenario in study.scenarios:
        outcome = scenario.outcomes["concurrent"]
        moving = scenario.communication
        waited = outcome.collective_slowdown * moving - moving
        shares.append(max(0.0, min(1.0, waited / scenario.compute)))
    return sum(shares) / len(shares)
