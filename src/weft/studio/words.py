"""Schedules, choices and outcomes in plain words."""

from __future__ import annotations

from weft.report.units import duration
from weft.schedule import Schedule
from weft.study.exploration import Scenario, ScheduleOutcome

OPERATIONS = {
    # operation: (title, what it does, labels of M, N and K)
    "all_gather_matmul": (
        "All-gather, then multiply",
        "Every rank collects the rows of all ranks and multiplies them by its own columns of the "
        "weights. The first layer of a tensor-parallel pair (QKV, gate and up) does this.",
        ("Rows (tokens)", "Columns of the weights", "Inner size"),
    ),
    "matmul_reduce_scatter": (
        "Multiply, then reduce-scatter",
        "Every rank multiplies its share of the inner size; the sums are spread over the ranks. "
        "The second layer of a tensor-parallel pair (projection, down) does this.",
        ("Rows (tokens)", "Columns of the result", "Inner size"),
    ),
    "matmul_all_reduce": (
        "Multiply, then all-reduce",
        "As reduce-scatter, but every rank gets all sums: tensor parallelism without sequence "
        "parallelism, as in inference.",
        ("Rows (tokens)", "Columns of the result", "Inner size"),
    ),
    "all_to_all_matmul": (
        "All-to-all, then multiply",
        "Tokens go to the ranks of their experts, which multiply them: the dispatch of a mixture "
        "of experts.",
        ("Routed rows", "Columns of the weights", "Inner size"),
    ),
    "matmul_all_to_all": (
        "Multiply, then all-to-all",
        "Experts multiply, and the results go back to the ranks of their tokens: the combine of a "
        "mixture of experts.",
        ("Routed rows", "Columns of the result", "Inner size"),
    ),
    "gather_contract": (
        "All-gather, then contract",
        "The gradient of the weights of an all-gather layer: the gathered rows are summed over.",
        ("Rows (tokens)", "Columns of the weights", "Inner size"),
    ),
    "embedding_all_to_all": (
        "Look up, then all-to-all",
        "Every rank looks up its tables for the whole batch and sends the pooled rows to the rank "
        "of each sample: recommendation models (DLRM) do this.",
        ("Samples in the batch", "Columns of all tables", "Rows per lookup"),
    ),
}

_ENGINES = {
    "dma": "copy engines move the bytes, so that all compute units stay with the product",
    "cores": "compute units move the bytes, as NCCL and RCCL do",
    "direct": "the product reads the peers' memory in place, so that nothing is copied",
}


def described(schedule: Schedule) -> str:
    """What a schedule does, in one sentence."""
    engine = _ENGINES[schedule.engine]
    if schedule.fusion == "kernel":
        return "One kernel computes and sends each piece as soon as it is made."
    if schedule.serial:
        return f"Nothing overlaps: all communication, then all compute (or the reverse); {engine}."
    if schedule.base == "shard-p2p":
        return f"One peer's whole shard at a time, each with a product of its own; {engine}."
    pieces = "columns" if schedule.cut == "columns" else "rows"
    how = {
        "fused": f"all peers send a piece of {pieces} in each step, and one product takes the step",
        "unfused": f"all peers send pieces of {pieces}, and each piece has a product of its own",
        "adaptive": f"pieces of {pieces} are multiplied as they arrive, as many as are there",
    }[schedule.fusion]
    start = "" if schedule.start == "uniform" else "; a rank begins with what it has"
    return f"{how[0].upper()}{how[1:]}{start}; {engine}."


def balance(scenario: Scenario) -> str:
    """How communication compares with compute, in one sentence."""
    compute, communication = scenario.compute, scenario.communication
    said = f"Alone, compute takes {duration(compute)} and communication {duration(communication)}"
    if communication > 1.25 * compute:
        return f"{said}: the links are the limit, so at best all compute hides behind them."
    if compute > 1.25 * communication:
        return f"{said}: compute is the limit, so at best all communication hides behind it."
    return f"{said}: they are about equal, which is where overlap can gain most."


def reason(scenario: Scenario, chosen: Schedule, rule: float, rule_serial: float) -> str:
    """Why `auto` chooses a schedule. rule: the seconds that its rule expects of the schedule, and
    of the best serial one."""
    if chosen.serial:
        return (
            f"{balance(scenario)} The rule behind auto expects no schedule to hide more than "
            f"cutting the work of {duration(rule_serial)} costs, so it does not overlap."
        )
    return (
        f"{balance(scenario)} The rule behind auto expects {duration(rule)} for {chosen.name}, "
        f"against {duration(rule_serial)} for serial."
    )


def verdict(scenario: Scenario, chosen: ScheduleOutcome | None) -> str:
    """What to use, in one sentence."""
    best = scenario.best
    if best.schedule.serial or best.speedup <= 1.005:
        said = "Do not overlap here: no schedule is more than 0.5 % faster than serial"
    else:
        said = f"Use {best.schedule.name}: {best.speedup:.2f}x over serial"
    if chosen is None:
        return f"{said}."
    slower = chosen.seconds / best.seconds - 1.0
    name = chosen.schedule.name
    if chosen.schedule == best.schedule:
        return f"{said}; auto chooses it."
    if slower < 0.01:
        return f"{said}; auto chooses {name}, which is as fast."
    return f"{said}; auto chooses {name}, {100 * slower:.0f} % slower than the best."
