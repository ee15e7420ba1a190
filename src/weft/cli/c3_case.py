"""`weft c3 --m --n --k --collective --size`: the user's own GEMM beside their own collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.cli.console import columns_per_rank, console, n_said, print_json, progress
from weft.machine import Machine
from weft.report.cells import Cell
from weft.report.terminal_table import table
from weft.report.units import byte_size
from weft.study.c3.own import CaseAnswer, CaseQuestion, ask
from weft.study.c3.simulated import WORLD

_HEADERS = ("strategy", "ms", "speedup", "of the\ngain", "GEMM", "collec-\ntive")
_BOTH = ("machine", "GEMM\nms", "coll.\nms", "serial\nms", "use", "ms", "speedup")


def ask_case(
    machines: Sequence[Machine],
    question: CaseQuestion,
    world: int | None,
    columns: tuple[int | None, int | None],
    json: bool,
) -> None:
    """One table per machine and a verdict; with several machines a comparison at the end. columns:
    N over all ranks or on each; one of them is None."""
    answers = []
    with progress("simulating", quiet=json) as report:
        for number, machine in enumerate(machines):
            report(number / len(machines), machine.name)
            ranks = min(WORLD, machine.links.world) if world is None else world
            own = columns_per_rank(*columns, ranks)
            answers.append(ask(machine, replace(question, n=own, world=ranks)))
    if json:
        found = [answer.to_json() for answer in answers]
        print_json(found[0] if len(found) == 1 else {"machines": found, "verdict": both(answers)})
        return
    for answer in answers:
        show(answer)
    if len(answers) > 1:
        rows: list[list[Cell]] = [
            [
                answer.machine.name,
                1e3 * answer.gemm,
                1e3 * answer.ways[answer.way],
                1e3 * answer.serial,
                answer.use.strategy.name,
                1e3 * answer.use.seconds,
                f"{answer.use.speedup:.2f}x",
            ]
            for answer in answers
        ]
        best = min(range(len(answers)), key=lambda i: answers[i].use.seconds)
        console.print(table(_BOTH, rows, best=best, width=console.width))
        console.print(both(answers))


def show(answer: CaseAnswer) -> None:
    """What each takes alone, every strategy, and which to use."""
    asked = answer.question
    bound = "memory" if answer.memory_bound else "arithmetic"
    alone = ", ".join(f"{1e3 * t:.3f} ms by {way}" for way, t in answer.ways.items())
    sent = byte_size(asked.size)
    console.print(
        f"{asked.world} x {answer.machine.name}, simulated\n"
        f"GEMM {asked.m} x {asked.n} x {asked.k} {asked.dtype}: {1e3 * answer.gemm:.3f} ms alone, "
        f"bound by {bound}\n{n_said(asked.n, asked.world)}\n"
        f"{asked.collective}, {sent} from each rank: {alone}\n"
        f"one after the other {1e3 * answer.serial:.3f} ms, ideal {1e3 * answer.ideal:.3f} ms"
    )
    rows: list[list[Cell]] = [
        [
            one.strategy.name,
            1e3 * one.seconds,
            f"{one.speedup:.2f}x",
            f"{one.percent_of_ideal:.0f} %",
            f"{one.gemm_slowdown:.2f}x",
            f"{one.collective_slowdown:.2f}x",
        ]
        for one in answer.tried
    ]
    caption = (
        "Of the gain: 0 % is one after the other, 100 % ideal, which is the longer of the two "
        "alone. Then how many times as long as alone the GEMM and the collective take. A number "
        "behind a name counts compute units: those set aside for the collective, or (trimmed) "
        "taken from the GEMM; the best of those tried is shown."
    )
    best = answer.tried.index(answer.use)
    console.print(table(_HEADERS, rows, best=best, caption=caption, width=min(80, console.width)))
    for name, reason in answer.refused.items():
        console.print(f"{name} is left out: {reason}.")
    console.print(answer.verdict())


def both(answers: Sequence[CaseAnswer]) -> str:
    """Which machine is quickest, and by how much."""
    order = sorted(answers, key=lambda answer: answer.use.seconds)
    first, last = order[0], order[-1]
    times = last.use.seconds / first.use.seconds
    return (
        f"{first.machine.name} ({first.use.strategy}) is the quickest, "
        f"{times:.2f}x as fast as {last.machine.name} ({last.use.strategy})."
    )
