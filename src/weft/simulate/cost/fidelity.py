"""Compares the cost models with published measurements: all comparisons, in one call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.dtype import PUBLISHED
from weft.machine import Machine, load, measurements
from weft.plan.command_variants import COMMANDS
from weft.simulate.cost.collective_cost import collective, dma_variants
from weft.simulate.cost.copy import copy
from weft.simulate.cost.gemm import gemm

MEBI = 1 << 20
# GEMMs that are compute-bound and memory-bound like those of the sources: the layers of
# Llama-2-70B (columns, depth) for the tokens of training batches and of decoding.
TOKENS = {"compute": (4096, 8192, 16384), "memory": (16, 32, 64)}
LAYERS = ((8192, 8192), (28672, 8192), (8192, 28672), (10240, 8192))


@dataclass(frozen=True)
class FidelityRow:
    """One measurement and its prediction. `error` is relative unless `what` states otherwise."""

    what: str
    size: str
    reference: float
    model: float
    error: float


@dataclass(frozen=True)
class FidelityFigure:
    """A number over many rows, and its promised bounds, if there are any."""

    what: str
    measure: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def reached(self) -> bool:
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)


@dataclass(frozen=True)
class Fidelity:
    rows: tuple[FidelityRow, ...]
    summaries: tuple[FidelityFigure, ...]


def compare() -> Fidelity:
    """All comparisons of the included machines with the included measurements."""
    parts = [_gemms(), _collectives(), _copies(), _variants(), _units_taken(), _ficco()]
    return Fidelity(
        tuple(row for rows, _ in parts for row in rows),
        tuple(summary for _, summaries in parts for summary in summaries),
    )


Part = tuple[list[FidelityRow], list[FidelityFigure]]
Promise = tuple[
    float | None, float | None
]  # the promised mean error for m >= 1024, and over all rows


def _row(what: str, size: str, reference: float, model: float) -> FidelityRow:
    return FidelityRow(what, size, reference, model, model / reference - 1.0)


def _mean(rows: Iterable[FidelityRow]) -> float:
    errors = [abs(row.error) for row in rows]
    return sum(errors) / len(errors)


def _worst(rows: Iterable[FidelityRow]) -> float:
    return max(abs(row.error) for row in rows)


def _gemms() -> Part:
    rows: list[FidelityRow] = []
    summaries = []
    sources: tuple[tuple[str, str, str, dict[str, Promise]], ...] = (
        ("gemm_h100", "h100", "", {"bfloat16": (0.10, 0.15)}),
        ("gemm_h100_held_out", "h100", ", held out", {"bfloat16": (0.07, 0.07)}),
        ("gemm_gfx942", "mi300x", "", {"bfloat16": (0.20, None), "int8": (0.20, None)}),
        ("gemm_b200", "b200", "", {"bfloat16": (0.10, 0.10)}),
        ("gemm_h200", "h200", "", {}),
        ("gemm_gb200", "gb200", "", {}),
        ("gemm_rtxpro6000", "rtxpro6000", "", {}),
    )
    for source, name, note, promised in sources:
        machine = load(name)
        by_dtype: dict[str, list[tuple[int, FidelityRow]]] = {}
        for line in measurements(source):
            m, n, k = int(line["m"]), int(line["n"]), int(line["k"])
            batch, dtype = int(line.get("batch", "1")), PUBLISHED[line["dtype"]]
            size = f"{batch} x {m} x {n} x {k}" if batch > 1 else f"{m} x {n} x {k}"
            model = gemm(machine, m, n, k, dtype, batch=batch).seconds
            row = _row(f"GEMM {name} {dtype}{note}", size, float(line["us"]) * 1e-6, model)
            by_dtype.setdefault(dtype, []).append((m, row))
        for dtype, lines in by_dtype.items():
            large, every = promised.get(dtype, (None, None))
            what = f"GEMM {name} {dtype}{note}"
            tall = _mean(row for m, row in lines if m >= 1024)
            summaries.append(FidelityFigure(what, "mean error, m >= 1024", tall, most=large))
            whole = _mean(row for _, row in lines)
            summaries.append(FidelityFigure(what, "mean error, all rows", whole, most=every))
            rows += [row for _, row in lines]
    return rows, summaries


def _collectives() -> Part:
    rows: list[FidelityRow] = []
    summaries = []
    mi300x = load("mi300x")
    what = "RCCL mi300x all_reduce"
    for line in measurements("rccl_mi300x_all_reduce"):
        rows.append(_core_driven(what, mi300x, "all_reduce", 8, line))
    summaries.append(FidelityFigure(what, "worst error, 1 MiB to 1 GiB", _worst(rows), most=0.15))
    for source, name in (
        ("nccl_h100", "h100"),
        ("nccl_h100_two_and_four", "h100"),
        ("nccl_b200", "b200"),
        ("nccl_h200", "h200"),
        ("nccl_gb200", "gb200"),
        ("nccl_rtxpro6000", "rtxpro6000"),
    ):
        machine = load(name)
        groups: dict[tuple[int, str], list[FidelityRow]] = {}
        for line in measurements(source):
            if int(line["bytes"]) < MEBI:
                continue
            kind = {"alltoall": "all_to_all"}.get(line["collective"], line["collective"])
            world = int(line["world"])
            row = _core_driven(f"NCCL {world} x {name} {kind}", machine, kind, world, line)
            groups.setdefault((world, kind), []).append(row)
        for (world, kind), found in groups.items():
            what = f"NCCL {world} x {name} {kind}"
            # Promised if all devices of a node take part, and on h100 if the switch makes no sums.
            # Machines that were not fitted to their rows, and the PCIe machine, are only compared.
            promised = world == machine.links.world and (
                name == "b200" or (name == "h100" and kind != "all_reduce")
            )
            most = 0.20 if promised else None
            summaries.append(
                FidelityFigure(what, "worst error, 1 MiB up", _worst(found), most=most)
            )
            summaries.append(FidelityFigure(what, "mean error, 1 MiB up", _mean(found)))
            rows += found
    return rows, summaries


def _core_driven(
    what: str, machine: Machine, kind: str, world: int, line: dict[str, str]
) -> FidelityRow:
    seconds = collective(machine, kind, int(line["bytes"]), world)
    return _row(what, line["bytes"], float(line["us"]) * 1e-6, seconds)


def _copies() -> Part:
    shares, puts = [], []
    machine = load("mi300x")
    for line in measurements("dma_copy_mi300x"):
        cost = copy(machine, int(line["bytes"]))
        # In the source, copying starts when the engine has the command.
        moving = machine.engines.packet + cost.bytes / cost.rate
        share, reference = 1.0 - moving / cost.seconds, float(line["non_copy_percent"]) / 100
        what = "DMA copy mi300x, share not copying (error in points)"
        shares.append(FidelityRow(what, line["bytes"], reference, share, share - reference))
    machine = load("mi355x")
    for line in measurements("dma_put_mi355x"):
        size = int(line["bytes"])
        rate = size / copy(machine, size, prelaunched=True).seconds
        puts.append(_row("DMA put mi355x", line["bytes"], float(line["gb_per_s"]) * 1e9, rate))
    return shares + puts, [
        FidelityFigure("DMA copy mi300x", "worst error in points", _worst(shares), most=0.10),
        FidelityFigure("DMA put mi355x", "worst error", _worst(puts), most=0.10),
    ]


def _variants() -> Part:
    rows, summaries = [], []
    machine = load("mi300x")
    for source, what, most in (
        ("dma_collective_variants_mi300x", "DMA variants mi300x", 2.0),
        ("dma_collective_variants_mi300x_held_out", "DMA variants mi300x, held out", None),
    ):
        misses = 0
        for line in measurements(source):
            kind, size = line["collective"], int(line["total_bytes"])
            special = COMMANDS[kind][1]
            seconds = dma_variants(machine, kind, size, 8)
            plain = seconds["pcpy", False]
            model = {name: plain / value for name, value in seconds.items()}
            reference = {
                ("pcpy", False): 1.0,
                ("pcpy", True): float(line["pcpy_prelaunch"]),
                (special, False): float(line["bcst_or_swap"]),
                (special, True): float(line["bcst_or_swap_prelaunch"]),
                ("b2b", False): float(line["b2b"]),
                ("b2b", True): float(line["b2b_prelaunch"]),
            }
            misses += max(model, key=lambda n: model[n]) != max(
                reference, key=lambda n: reference[n]
            )
            for name, value in reference.items():
                label = f"{kind} {size} {name[0]}{' prelaunched' if name[1] else ''}"
                rows.append(_row(f"{what}, speedup over pcpy", label, value, model[name]))
        summaries.append(
            FidelityFigure(what, "sizes with another winner", float(misses), most=most)
        )
    return rows, summaries


def _ficco_shapes() -> list[tuple[str, int, int, int]]:
    """The shape of each FiCCO scenario on one of 8 ranks: all rows, an eighth of the columns."""
    return [
        (line["id"], int(line["m"]), int(line["n"]) // 8, int(line["k"]))
        for line in measurements("ficco_scenarios")
    ]


def _units_taken() -> Part:
    """GEMMs beside a core-driven collective, which takes units and interferes.

    The source does not list its shapes, and the mean depends on them. The promise is checked with
    the Llama layers; the FiCCO shapes are shown for comparison.
    """
    machine = load("mi300x")
    llama = {
        bound: [(m, n, k) for m in tokens for n, k in LAYERS] for bound, tokens in TOKENS.items()
    }
    rows, summaries = [], []
    for line in measurements("cu_loss_mi300x"):
        bound, taken = line["bound"], int(line["units_taken"])
        what = f"{bound}-bound GEMM mi300x, units taken (error in points)"
        measure, reference = f"slowdown without {taken}", float(line["slower_percent"]) / 100
        model = _mean_slowdown(machine, llama[bound], bound, taken)
        rows.append(FidelityRow(what, line["units_taken"], reference, model, model - reference))
        allowed = 0.04 if bound == "compute" else 0.05
        summaries.append(
            FidelityFigure(what, measure, model, reference - allowed, reference + allowed)
        )
        if bound == "compute":
            shapes = [(m, n, k) for _, m, n, k in _ficco_shapes()]
            other = _mean_slowdown(machine, shapes, bound, taken)
            summaries.append(FidelityFigure(f"{what}, FiCCO shapes", measure, other))
    return rows, summaries


def _mean_slowdown(
    machine: Machine, shapes: list[tuple[int, int, int]], bound: str, taken: int
) -> float:
    left = machine.compute.units - taken
    slower = [
        gemm(machine, m, n, k, units=left).seconds / gemm(machine, m, n, k).seconds - 1.0
        for m, n, k in shapes
    ]
    return sum(slower) / len(slower)


def _ficco() -> Part:
    """The largest ideal speedup, which is about 1.7 in the paper."""
    machine = load("mi300x")
    speedups = []
    for _, m, n, k in _ficco_shapes():
        compute = gemm(machine, m, n, k).seconds
        moving = collective(machine, "all_gather", 2 * m * k, 8, driver="dma", prelaunch=True)
        speedups.append((compute + moving) / max(compute, moving))
    return [], [FidelityFigure("FiCCO mi300x", "largest ideal speedup", max(speedups), 1.6, 1.9)]
