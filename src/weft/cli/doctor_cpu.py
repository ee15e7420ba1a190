"""The part of `weft doctor` about processors: NUMA nodes, affinity, threads per rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from weft.fabric.host.numa import Nodes

Line = tuple[str, str, str]
"""What was looked at, what was found, and what to change."""


def processors(
    nodes: Nodes, cores: Collection[int], threads: int, environment: Mapping[str, str]
) -> list[Line]:
    """What this process may use. cores: those of its affinity. threads: torch's."""
    own = [node for node, known in nodes.items() if known & set(cores)]
    count = max(1, len(nodes))
    return [
        ("NUMA nodes", _nodes(nodes), ""),
        ("affinity", f"{_spelt(cores)}{_on(own) if count > 1 else ''}", _spread(own, environment)),
        ("threads per rank", str(threads), _threads(len(cores), len(own), threads, environment)),
    ]


def _nodes(nodes: Nodes) -> str:
    if len(nodes) < 2:
        return "1"
    return f"{len(nodes)}: " + "; ".join(f"{_spelt(cores)}" for cores in nodes.values())


def _on(own: list[int]) -> str:
    return f" on node {', '.join(map(str, own))}"


def _spread(own: list[int], environment: Mapping[str, str]) -> str:
    if len(own) < 2:
        return ""
    node = environment.get("LOCAL_RANK", "$LOCAL_RANK")
    return f"one rank per node, under numactl --cpunodebind={node} --membind={node}"


def _threads(cores: int, nodes: int, threads: int, environment: Mapping[str, str]) -> str:
    ranks = _ranks(environment) or max(1, nodes)
    fit = max(1, cores // ranks)
    several = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if threads > cores:
        return f"more threads than cores wait for each other: OMP_NUM_THREADS={cores} or less"
    if "OMP_NUM_THREADS" not in environment:
        return f"torchrun makes it 1 unless told: OMP_NUM_THREADS={fit} for {several}"
    return ""


def _ranks(environment: Mapping[str, str]) -> int:
    """The ranks of this machine, if torchrun has said it."""
    said = environment.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() else 0


def _spelt(cores: Collection[int]) -> str:
    """The cores as the kernel lists them, e.g. cores 0-2,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return "cores " + ",".join("-".join(map(str, run)) for run in runs)
