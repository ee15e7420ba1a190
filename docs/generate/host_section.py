"""The section of docs/fidelity.md about this host: the saved results of `weft bench predict`."""

from __future__ import annotations

from weft.study.prediction import kept_results

_NOT_MEASURED = """## This host against its own measurement

Not measured where this was written: run `weft calibrate`, then `weft bench predict`, then
`weft bench fidelity --write docs` again.
"""


def section() -> str:
    """The section as Markdown, with its heading."""
    try:
        found = kept_results()
        rows, checks = found["rows"], found["checks"]
        headers = list(rows[0])
        lines = [
            "## This host against its own measurement",
            "",
            "`weft calibrate`, then `weft bench predict`: all schedules of 12 shapes that",
            "calibration did not see, measured here and simulated on the calibrated machine.",
            "",
            f"| {' | '.join(headers)} |",
            f"| {' | '.join('---' for _ in headers)} |",
            *(f"| {' | '.join(str(row[name]) for name in headers)} |" for row in rows),
            "",
            *(
                f"- {c['name']}: {c['value']:.3g} (target: {c['bar']}, "
                f"{'kept' if c['ok'] else 'missed'})"
                for c in checks
            ),
            "",
            "Noise is how much two halves of a schedule's own rounds differ. Left out of the",
            "model: what other processes do, caches beyond the mean over all ranks at work, and",
            "which of the threads that want a core gets it first (means are taken).",
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return _NOT_MEASURED
    return "\n".join(lines) + "\n"
