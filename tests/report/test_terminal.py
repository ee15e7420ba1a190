"""Terminal drawings: never too wide, true to the times, and readable without colour or Unicode."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from weft.report.raster import rasterize
from weft.report.terminal import draw
from weft.report.terminal_table import table
from weft.report.units import ticks
from weft.timeline import COMPUTE, Span, Timeline

PLAIN_MATMUL = "▏▎▍▌▋▊▉█▐"


def printed(
    renderable: RenderableType, width: int = 100, colour: bool = False, encoding: str = "utf-8"
) -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=stream,
        width=width,
        color_system="truecolor" if colour else None,
        force_terminal=colour,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(renderable)
    text = capture.get()
    text.encode(encoding)
    return text.splitlines()


def visible(lines: Sequence[str]) -> list[str]:
    return [Text.from_ansi(line).plain for line in lines]


def row(lines: Sequence[str], label: str) -> str:
    return next(line for line in lines if label in line)


def one(*spans: tuple[str, str, float, float], title: str = "t") -> Timeline:
    return Timeline(
        tuple(Span(0, lane, f"task {i}", kind, a, b) for i, (lane, kind, a, b) in enumerate(spans)),
        title,
    )


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize(("asked", "console"), [(100, 100), (100, 240), (100, 61), (60, 100)])
def test_no_line_is_wider_than_asked_or_than_the_console(
    runs: list[Timeline],
    wide_runs: list[Timeline],
    pieces: Callable[..., Timeline],
    colour: bool,
    asked: int,
    console: int,
) -> None:
    long_name = one((COMPUTE, "matmul", 0.0, 0.1), title="a very long title " * 9)
    many = [pieces(1), pieces(7), pieces(5000)]
    for timelines in (runs, wide_runs, many, [long_name], [long_name, *runs]):
        lines = visible(printed(draw(timelines, asked), console, colour))
        assert max(map(cell_len, lines)) <= min(asked, console)
        # A line that wrapped would come out as two: a heading and a row for each, nothing more.
        assert sum(line.lstrip().startswith("rank ") for line in lines) == sum(
            len(timeline.ranks) for timeline in timelines
        )


def test_without_colour_there_are_no_escapes_and_kinds_differ(runs: list[Timeline]) -> None:
    lines = printed(draw(runs))
    assert not any("\x1b" in line for line in lines)
    text = "\n".join(lines)
    assert "█ matmul" in text
    assert "▒ permute" in text
    assert "1 copy · peer 1" in text
    assert "111111" in row(lines, "engine 1")


def test_colours_of_compute_and_of_each_peer_differ(runs: list[Timeline]) -> None:
    lines = printed(draw(runs), colour=True)
    assert "38;2;0;114;178" in row(lines, "compute")
    first, second = (row(lines, f"engine {peer}").split("38;2;")[1][:9] for peer in (0, 1))
    assert first != second


def test_a_console_without_unicode_gets_ascii(runs: list[Timeline]) -> None:
    lines = printed(draw(runs), encoding="ascii")
    assert "###" in row(lines, "compute")


@pytest.mark.parametrize("width", [40, 77, 100])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_a_share_of_the_axis_fills_that_share_of_the_cells(width: int, share: float) -> None:
    timeline = one((COMPUTE, "matmul", 5.0, 5.0 + share), ("engine 1", "copy", 5.0, 6.0))
    lines = printed(draw([timeline], width), width)
    num_cells = row(lines, "engine 1").count("1") - 1  # one more is in the label
    filled = sum(PLAIN_MATMUL.index(c) + 1 for c in row(lines, "compute") if c in PLAIN_MATMUL) / 8
    assert filled == pytest.approx(share * num_cells, abs=1 / 8)


@pytest.mark.parametrize(("begin", "end"), [(0.3, 0.7), (0.013, 0.99), (0.5, 1.0), (0.4, 0.404)])
def test_cells_are_true_to_an_eighth_at_both_ends(begin: float, end: float) -> None:
    num_cells = 80
    cells = rasterize(
        [Span(0, COMPUTE, "t", "matmul", 2.0 + begin, 2.0 + end)], 2.0, 1.0, num_cells
    )
    eighths = [
        key
        for cell in cells
        for key in [cell.left] * cell.eighths + [cell.right] * (8 - cell.eighths)
    ]
    busy = [index for index, key in enumerate(eighths) if key is not None]
    assert len(busy) == pytest.approx((end - begin) * num_cells * 8, abs=1)
    assert busy[0] == pytest.approx(begin * num_cells * 8, abs=4)
    assert busy[-1] + 1 == pytest.approx(end * num_cells * 8, abs=4)


@pytest.mark.parametrize(("gap", "expected"), [(0.0, "█"), (0.3, "█"), (0.7, " ")])
def test_where_many_spans_share_a_cell_the_majority_fills_it(
    pieces: Callable[..., Timeline], gap: float, expected: str
) -> None:
    drawn = row(printed(draw([pieces(4000, 1, gap)])), "compute")[len("rank 0 compute ") : -2]
    assert set(drawn) - {"┊"} == {expected}


def test_timelines_share_one_axis_and_each_says_its_total(runs: list[Timeline]) -> None:
    lines = printed(draw(runs))
    for timeline in runs:
        total = row(lines, timeline.title).split()[-3:-1]
        assert float(total[0]) == pytest.approx(timeline.seconds * 1e3, rel=0.005)
        assert total[1] == "ms"
    ends = [len(row(lines, t.title).rstrip()) for t in runs]
    gutter = len("rank 0 compute  ")
    scale = (ends[0] - gutter) / runs[0].seconds
    for timeline, end in zip(runs, ends, strict=True):
        assert (end - gutter) == pytest.approx(timeline.seconds * scale, abs=1.5)
    assert sum("┴" in line for line in lines) == 1


def test_the_unit_can_be_chosen(runs: list[Timeline]) -> None:
    assert "100400 us" in row(printed(draw(runs, unit="us")), "serial")
    assert "0 us" in "\n".join(printed(draw(runs, unit="us")))


def test_more_than_three_engines_fold_into_how_many_are_busy() -> None:
    engines = [(f"engine {peer}", "copy", 0.0, 0.5 if peer > 2 else 1.0) for peer in range(1, 5)]
    lines = printed(draw([one((COMPUTE, "matmul", 0.0, 1.0), *engines)]))
    folded = row(lines, "4 engines")
    assert "engine 1" not in "\n".join(lines)
    assert folded.count("█") == pytest.approx(folded.count("▄"), abs=1)
    unfolded = printed(draw([one((COMPUTE, "matmul", 0.0, 1.0), *engines[:3])]))
    assert all(row(unfolded, f"engine {peer}") for peer in (1, 2, 3))


def test_waits_are_empty() -> None:
    lines = printed(draw([one((COMPUTE, "wait", 0.0, 0.5), (COMPUTE, "matmul", 0.5, 1.0))]))
    drawn = row(lines, "compute")
    assert drawn.count("█") == pytest.approx(84 / 2, abs=1)
    assert "wait" not in "\n".join(lines)


@pytest.mark.parametrize(
    "timelines",
    [[], [Timeline(())], [one((COMPUTE, "matmul", 1.0, 1.0))], [Timeline(()), one()]],
)
def test_nothing_recorded_is_no_error(timelines: list[Timeline]) -> None:
    assert printed(draw(timelines))


@pytest.mark.parametrize("end", [0.001, 0.7, 1.0, 99.4, 100.0, 12345.0])
@pytest.mark.parametrize("at_most", [1, 4, 8])
def test_ticks_are_round_few_and_inside(end: float, at_most: int) -> None:
    values = ticks(end, at_most)
    assert values[0] == 0.0
    assert values[-1] <= end * (1 + 1e-9)
    assert len(values) <= at_most + 1


HEADERS = ["schedule", "ms", "speedup", "why [it] won"]
ROWS: list[list[str | int | float | None]] = [
    ["serial@dma", 102.44, "1.00x", None],
    ["adaptive@dma", 61.2, "1.67x", "compute never waits " * 12],
]


@pytest.mark.parametrize("console", [100, 200, 50])
def test_tables_fit(console: int) -> None:
    lines = printed(table(HEADERS, ROWS, best=1, title="t [x]", caption="c" * 300), console)
    assert max(map(cell_len, lines)) <= min(console, 100)


def test_numbers_are_right_aligned_and_the_best_row_is_marked_without_colour() -> None:
    lines = printed(table(HEADERS, ROWS, best=1))
    serial, adaptive = row(lines, "serial"), row(lines, "adaptive")
    assert serial.index("102.4") + 5 == adaptive.index("61.2") + 4
    assert ">" in adaptive
    assert ">" not in serial
    assert "why [it] won" in row(lines, "schedule")


def test_a_row_that_does_not_fit_its_headers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells under 4 headers"):
        table(HEADERS, [["serial", 1]])
