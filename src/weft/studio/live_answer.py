"""A live run as plain data for the page: medians beside predictions, and one recorded call each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.machine import Machine
from weft.measure.measurement import RECORDED, Arm, Measurement
from weft.operation import ranks_label
from weft.report.run_page import AUTO, FIRST, PLAIN, PREDICTED, times
from weft.report.run_report import name_of, standing, verdict
from weft.studio.answers import legend, spans
from weft.studio.live_case import LiveCase
from weft.study.prediction import Prediction, at_speed, forecast, on_link, predict
from weft.timeline import Timeline

Answer = dict[str, Any]


def answer(case: LiveCase, result: Measurement, host: Machine, calibrated: bool) -> Answer:
    """host: the description of this computer, from which the prediction comes."""
    prediction = _predicted(result, host) if case.where == "host" else None
    figure, height = times(result, prediction)
    forecasts = {} if prediction is None else {f.arm.name: f for f in prediction.forecasts}
    first = standing(result).first
    calls = []
    for arm in sorted(result.every, key=lambda one: one.seconds):
        known = forecasts.get(arm.name)
        recorded = _from_zero(arm.timeline.of(0))
        simulated = None if known is None else _from_zero(known.timeline.of(0))
        drawn = [one for one in (recorded, simulated) if one is not None]
        calls.append(
            {
                "name": name_of(arm),
                "first": arm.name in first,
                "ms": 1e3 * arm.seconds,
                "speedup": arm.speedup,
                "recorded": _line(arm, recorded),
                "predicted": None if simulated is None else _line(arm, simulated),
                "legend": legend(drawn),
            }
        )
    return {
        "case": f"{case.state.op}, {case.state.m} x {case.state.n} x {case.state.k}, "
        f"{ranks_label(case.state.world)}, {case.state.dtype}",
        "where": where(case, result, host),
        "verdict": verdict(result),
        "busy": result.busy,
        "compared": "" if prediction is None else compared(prediction, calibrated),
        "rounds": case.rounds,
        "recorded": f"One recorded call of rank 0: the middle one of {RECORDED} that were recorded "
        "after the rounds, so its time is not exactly the median above.",
        "facts": {
            "compute alone": 1e3 * result.compute,
            "communication alone": 1e3 * result.communication,
            "serial": 1e3 * result.serial,
            "complete overlap": 1e3 * result.ideal,
        },
        "colours": colours(result, prediction),
        "figure": figure,
        "height": height,
        "calls": calls,
    }


def colours(result: Measurement, prediction: Prediction | None) -> list[tuple[str, str]]:
    """The legend of the figure."""
    if prediction is not None:
        return [("measured here", PLAIN), ("predicted for this computer", PREDICTED)]
    crowned = [("fastest", FIRST)] if standing(result).first else []
    return [("measured here", PLAIN), *crowned, ("auto", AUTO)]


def where(case: LiveCase, result: Measurement, host: Machine) -> str:
    """Which machine the figures are of, in plain words."""
    ranks = f"{case.state.world} rank processes"
    if case.where == "loom":
        return (
            f"Measured on loom, an emulated device, with {ranks} on this computer. The times show "
            "the order of work, not the speed of a GPU, and there is no prediction for loom."
        )
    rate = result.link.bandwidth
    links = "as fast as memory" if rate is None else f"paced to {rate / 1e9:.3g} GB/s each"
    return f"Measured on this computer ({host.title}) with {ranks}; links are {links}."


def compared(prediction: Prediction, calibrated: bool) -> str:
    """How well the prediction of this computer fits, and where it comes from."""
    source = (
        f"at {prediction.speed:.2f} of its calibrated speed, as a yardstick showed"
        if calibrated
        else "by a default description, because it is not calibrated (`weft calibrate`)"
    )
    return (
        f"Predicted is this computer too, {source}. Median error "
        f"{prediction.median_error_percent:.0f} %; two halves of the rounds differ by "
        f"{prediction.noise_percent:.0f} %."
    )


def _predicted(result: Measurement, host: Machine) -> Prediction:
    """The prediction of all schedules, and of `auto` by the one that it has chosen."""
    found = predict(result, host)
    if result.auto is None:
        return found
    operation: Any = result.operation
    now = on_link(at_speed(host, found.speed), result.link)
    chosen = forecast(operation, replace(result.auto, name=result.auto.chose), now)
    return replace(found, forecasts=(*found.forecasts, replace(chosen, arm=result.auto)))


def _line(arm: Arm, timeline: Timeline) -> Answer:
    ms = 1e3 * timeline.seconds
    return {**spans(timeline), "name": name_of(arm), "ms": ms, "speedup": arm.speedup}


def _from_zero(timeline: Timeline) -> Timeline:
    """Recorded spans begin at the moment of their call."""
    begin = timeline.start
    moved = (replace(s, start=s.start - begin, end=s.end - begin) for s in timeline.spans)
    return replace(timeline, spans=tuple(moved))
