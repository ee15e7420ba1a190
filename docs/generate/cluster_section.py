"""The section of docs/fidelity.md about clusters: another simulator, and the saving of DLRM."""

from __future__ import annotations

from pathlib import Path

from weft.study.clusters import against_astra_sim
from weft.study.dlrm_story import CLUSTERS, NODES, DlrmStory, tell_dlrm


def section() -> str:
    """Runs both comparisons and writes the section."""
    compared, story = against_astra_sim(), tell_dlrm()
    largest = max(compared, key=lambda row: abs(row.error))
    parts = {
        "rows": str(len(compared)),
        "largest": f"{100 * abs(largest.error):.2f} %",
        "which": largest.what,
        "clusters": " and ".join(f"`{name}`" for name in CLUSTERS),
        "nodes": str(NODES),
        "table": _table(story),
        "parts": _parts(story),
        "mlperf": " and ".join(_percent(saving) for saving in story.mlperf),
        "stated": " and ".join(_percent(saving) for saving in story.savings["as stated"]),
    }
    text = Path(__file__).with_suffix(".md").read_text("utf-8")
    for name, value in parts.items():
        assert f"<!-- {name} -->" in text, name
        text = text.replace(f"<!-- {name} -->", value)
    return text.rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(story: DlrmStory) -> str:
    lines = [
        f"| one assumption changed | {' | '.join(CLUSTERS)} |",
        f"| --- |{' --- |' * len(CLUSTERS)}",
        *(
            f"| {name} | {' | '.join(_percent(saving) for saving in savings)} |"
            for name, savings in story.savings.items()
        ),
    ]
    return "\n".join(lines)


def _parts(story: DlrmStory) -> str:
    """Where the time of the plain and the fused step goes."""
    names = {
        "lookup": "lookup",
        "all-to-all forward": "all-to-all forward",
        "all-to-all backward": "all-to-all backward (beside the sums of gradients)",
        "update": "update of rows",
    }
    heads = [f"{name}, {arm}" for name in CLUSTERS for arm in ("plain", "fused")]
    lines = [f"| ms | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for key, name in names.items():
        cells = [
            f"{1e3 * point.parts(fused).get(key, 0.0):.2f}"
            for point in story.stated
            for fused in (False, True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    totals = [1e3 * ran.seconds for point in story.stated for ran in (point.plain, point.fused)]
    lines.append(f"| **whole step** | {' | '.join(f'{ms:.2f}' for ms in totals)} |")
    return "\n".join(lines)
