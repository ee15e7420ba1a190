"""What notebooks show of weft's objects: small tables and drawings that need no script, readable on
light and dark ground."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Bar = tuple[float, float, str, str]
"""Of a drawing: start and end in seconds, colour, and what the pointer is told."""

_WIDTH, _LABEL, _ROW = 720, 130, 18


def table(rows: Sequence[Sequence[object]], headers: Sequence[str] = (), title: str = "") -> str:
    """A table. Without headers, the first column names the rows."""
    head = "".join(f"<th style='text-align:left'>{escape(text)}</th>" for text in headers)
    body = "".join(
        "<tr>"
        + "".join(_cell(cell, not headers and i == 0) for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f"{_title(title)}<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}"
        f"<tbody>{body}</tbody></table>"
    )


def drawing(lanes: Sequence[tuple[str, Sequence[Bar]]], seconds: float, title: str = "") -> str:
    """Bars on lanes over time, from 0 to `seconds`."""
    height = _ROW * len(lanes) + 20
    scale = (_WIDTH - _LABEL) / max(seconds, 1e-12)
    parts = []
    for place, (label, bars) in enumerate(lanes):
        top = place * _ROW
        parts.append(
            f'<text x="0" y="{top + 13}" font-size="12" fill="currentColor">{escape(label)}</text>'
        )
        parts += (
            f'<rect x="{_LABEL + start * scale:.1f}" y="{top + 2}" height="{_ROW - 4}" '
            f'width="{max(0.5, (end - start) * scale):.1f}" fill="{colour}">'
            f"<title>{escape(said)}</title></rect>"
            for start, end, colour, said in bars
        )
    parts.append(
        f'<text x="{_WIDTH}" y="{height - 4}" font-size="12" text-anchor="end" '
        f'fill="currentColor">{seconds * 1e3:.3g} ms</text>'
    )
    return (
        f'{_title(title)}<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'style="max-width:100%" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def _cell(cell: object, head: bool) -> str:
    tag = "th" if head else "td"
    return f"<{tag} style='text-align:left'>{escape(str(cell))}</{tag}>"


def _title(title: str) -> str:
    return f"<p><b>{escape(title)}</b></p>" if title else ""
