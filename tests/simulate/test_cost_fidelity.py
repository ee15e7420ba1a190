"""Every promised comparison is made, and every promise about it is kept."""

from __future__ import annotations

from weft.simulate.cost.fidelity import Fidelity, FidelityFigure


def test_every_promise_is_kept(fidelity: Fidelity) -> None:
    missed = [summary for summary in fidelity.summaries if not summary.reached]
    assert missed == []


def test_every_comparison_is_there(fidelity: Fidelity) -> None:
    promised = [s for s in fidelity.summaries if s.most is not None]
    assert {s.what for s in promised} >= {
        "GEMM h100 bfloat16",
        "GEMM h100 bfloat16, held out",
        "GEMM mi300x bfloat16",
        "GEMM mi300x int8",
        "RCCL mi300x all_reduce",
        "NCCL 8 x h100 all_gather",
        "NCCL 8 x h100 reduce_scatter",
        "NCCL 8 x h100 all_to_all",
        "DMA copy mi300x",
        "DMA put mi355x",
        "DMA variants mi300x",
        "FiCCO mi300x",
    }
    assert sum(s.what.startswith("compute-bound") for s in promised) == 2
    assert len([row for row in fidelity.rows if row.what == "GEMM h100 bfloat16"]) == 600


def test_a_missed_promise_shows() -> None:
    assert not FidelityFigure("x", "error", 0.3, most=0.2).reached
    assert not FidelityFigure("x", "speedup", 1.5, least=1.6, most=2.0).reached
    assert FidelityFigure("x", "error", 0.3).reached
