"""Forward and backward of a Llama-style transformer: torch's parallel styles against weft's.

Both arms use the same paced link. `weft.measure.emulate` runs torch's collectives on it: the same
bytes over the same links, with weft's serial schedule. The rate of the link is chosen so that the
torch arm spends 40 % of its time in collectives. That share includes staging and sums. Steps in
which `auto` still compares its choices come before those that are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.benchmarks import Check, Result
from weft.fabric import Link
from weft.measure.emulate import Traffic, plain_collectives
from weft.measure.launch import Report, launch
from weft.measure.measurement import interleaved
from weft.models.small_llama import Kind, Llama, LlamaShape, parallelize
from weft.select.guard import MOST_CALLS

SHAPE = LlamaShape(size=512, hidden=1536, num_heads=8, num_layers=4, vocabulary=256)
SEQUENCE = 512
BATCH = 1
WORLD = 2
COMMUNICATION = 0.4
"""The share of communication in the time of the torch arm."""
SCHEDULE = "auto"
REPEAT = 9
CALIBRATE = 7


def run(report: Report) -> Result:
    """The median milliseconds of forward + backward, and whether both arms have the same loss."""
    figures = launch(WORLD, _measure, SHAPE, SEQUENCE, REPEAT, report=report)[0]
    ratio = figures["torch"] / figures["weft"]
    rows: list[list[str | float]] = [
        ["torch's styles", round(figures["torch"] * 1e3, 1), f"{figures['share'] * 100:.0f}"],
        ["weft's styles", round(figures["weft"] * 1e3, 1), ""],
        ["torch's styles, memory speed", round(figures["memory"] * 1e3, 1), ""],
    ]
    checks = [
        Check("torch's share of communication", figures["share"], ">= 0.35"),
        Check("torch's share of communication, at most", figures["share"], "<= 0.45"),
        Check(f"weft over torch, link {figures['rate'] / 1e9:.3g} GB/s", ratio, ">= 1.3"),
        Check("difference of the losses", figures["apart"], "<= 1e-5"),
    ]
    return Result(("arm", "ms", "communication %"), rows, checks)


def _measure(report: Report, shape: LlamaShape, sequence: int, repeat: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocabulary, (BATCH, sequence), generator=random)
    losses: dict[str, float] = {}

    def arm(kind: Kind) -> Callable[[], None]:
        model = parallelize(Llama(shape), mesh, kind, SCHEDULE)

        def step() -> None:
            model.zero_grad()
            loss = model.loss(tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[kind] = loss.item()

        return step

    with plain_collectives() as traffic:
        plain = arm("torch")
        arms = {"torch": plain, "weft": arm("weft")}
        rate, memory = _rate(plain, traffic, report)
        weft.configure(link=Link(rate))
        for step in range(steps := -(-MOST_CALLS // shape.num_layers)):
            report(step / steps, "auto compares its choices")
            arms["weft"]()
        inside: list[float] = []

        def observed() -> None:
            traffic.clear()
            plain()
            inside.append(traffic.seconds)

        samples = interleaved({**arms, "torch": observed}, repeat, report)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        **medians,
        "memory": memory,
        "share": statistics.median(inside) / medians["torch"],
        "rate": rate,
        "apart": abs(losses["torch"] - losses["weft"]),
    }


def _rate(plain: Callable[[], None], traffic: Traffic, report: Report) -> tuple[float, float]:
    """The rate of the link, and the seconds of a run at memory speed, from which it follows. The
    time of collectives at memory speed (staging, sums) is part of the 40 %."""
    inside: list[float] = []

    def step() -> None:
        traffic.clear()
        plain()
        inside.append(traffic.seconds)

    whole = statistics.median(interleaved({"memory": step}, CALIBRATE, report)["memory"])
    moving = statistics.median(inside[-CALIBRATE:])
    both = torch.tensor([whole - moving, moving], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    compute, fixed = both.tolist()
    wanted = compute * COMMUNICATION / (1 - COMMUNICATION)
    return traffic.num_bytes / max(wanted - fixed, wanted / 4), whole
