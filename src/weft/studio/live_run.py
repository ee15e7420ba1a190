"""The process of one live run: `python -m weft.studio.live_run`, started by `live`.

It reads the query of a case from standard input, and writes one JSON object per line to standard
output: progress, then a result or an error. It ends, with its ranks, when it is terminated or when
standard input is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from weft.errors import Error, Unsupported
from weft.machine import Machine, load
from weft.measure.calibration import YARDSTICK
from weft.measure.measurement import Measurement, measure
from weft.select import heuristic, this_host
from weft.select.sizes import NoRule
from weft.studio.live_answer import answer
from weft.studio.live_case import LiveCase

Say = Callable[[dict[str, Any]], None]


def main() -> None:
    """Runs one case."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries and ranks print is no answer

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    query = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, _terminated)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    try:
        run(LiveCase.from_query(query), say)
    except Error as error:
        say({"error": f"This cannot be measured: {error}"})
    except Exception as error:
        say({"error": f"The run failed: {error!r}"})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself now


def run(case: LiveCase, say: Say) -> None:
    """Measures the case, and says how far it is."""
    say({"progress": 0.0, "text": f"starting {case.state.world} ranks"})
    result = _measured(case, say)
    calibrated, host = _host()
    say({"result": answer(case, result, host, calibrated)})


def _measured(case: LiveCase, say: Say) -> Measurement:
    def report(share: float, text: str) -> None:
        of = f" of {case.rounds}" if text.startswith("round ") else ""
        say({"progress": share, "text": f"{text}{of}"})

    on_host = case.where == "host"
    return measure(
        case.state.operation(),
        case.link,
        case.schedules(_choices(case)),
        repeat=case.rounds,
        yardstick=YARDSTICK[1:] if on_host else None,
        device="cpu" if on_host else "loom",
        auto=True,
        report=report,
    )


def _choices(case: LiveCase) -> tuple[str, ...]:
    """What `auto` chooses on the machines that are asked about."""
    found = []
    operation: Any = case.state.operation()
    for machine in case.state.machines():
        try:
            found.append(heuristic.choose(machine, operation).schedule.name)
        except NoRule:
            continue
    return tuple(found)


def _host() -> tuple[bool, Machine]:
    """Whether this computer is calibrated, and its description. The first `auto` call of the run
    calibrates it, unless that is turned off."""
    try:
        return True, load("cpu")
    except Unsupported:
        return False, this_host.default()


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(1)  # ends the ranks on its way out


def _end_with_the_server() -> None:
    sys.stdin.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
