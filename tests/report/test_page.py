"""Pages: complete, offline by construction, safe against odd names, written whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import re
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from weft.errors import Unsupported
from weft.report import page as page_module
from weft.report.page import Page
from weft.report.run_page import where_row
from weft.timeline import COMPUTE, Span, Timeline


class Reader(HTMLParser):
    """Collects the elements of a page, the text outside of scripts, and the figures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self.text = ""
        self.scripts: list[str] = []
        self._inside: list[tuple[str, dict[str, str | None]]] = []
        self.feed(path.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data
            return
        tag, attributes = self._inside[-1]
        if figure := attributes.get("data-figure"):
            self.figures[figure] = json.loads(data)
        elif "data-figures" in attributes:
            packed = json.loads(gzip.decompress(b64decode(data)))
            self.figures |= {id_: json.loads(spec) for id_, spec in packed.items()}
        elif tag == "script":
            self.scripts.append(data)

    @property
    def gantts(self) -> list[dict[str, Any]]:
        return [f for f in self.figures.values() if f["layout"].get("meta", {}).get("gantt")]


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Most tests look at what is weft's, and need not read megabytes each time."""
    if "real" not in request.node.name:
        monkeypatch.setattr(page_module, "plotly_js", lambda: "/* plotly */")


def write(path: Path, timelines: list[Timeline], **keywords: Any) -> Reader:
    page = Page(keywords.pop("title", "A run"), keywords.pop("summary", ""))
    page.facts(keywords.pop("facts", {})).section("Timelines")
    return Reader(page.timelines(timelines, **keywords).write(path / "page.html"))


def assert_offline(reader: Reader) -> None:
    loading = {"src", "srcset", "data", "poster", "action", "background"}
    for tag, attributes in reader.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not loading & attributes.keys(), (tag, attributes)
    policies = [a["content"] for tag, a in reader.elements if "http-equiv" in a]
    assert len(policies) == 1
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'")
    assert "http" not in policies[0]


def test_a_real_page_loads_nothing_and_holds_plotly_once(
    tmp_path: Path, runs: list[Timeline]
) -> None:
    reader = write(tmp_path, runs, ideal=0.05)
    assert_offline(reader)
    assert sum("plotly.js v" in script for script in reader.scripts) == 1
    assert len(reader.scripts) == 2
    assert "Plotly.newPlot" in reader.scripts[1]
    assert (tmp_path / "page.html").stat().st_size < 1.5e6


def test_large_figures_are_compressed_and_say_the_same(
    tmp_path: Path, runs: list[Timeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(tmp_path, runs)
    monkeypatch.setattr(page_module, "PACKED_ABOVE", 0)
    packed = write(tmp_path, runs)
    assert any("data-figures" in a for _, a in packed.elements)
    assert packed.figures == plain.figures
    assert plain.figures


def test_weft_own_script_and_style_name_no_address_and_no_upload() -> None:
    folder = Path(page_module.__file__).parent
    for name in ("page.css", "page.js"):
        text = (folder / name).read_text("utf-8")
        assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(|XMLHttp", text)
    assert "showSendToCloud: false" in (folder / "page.js").read_text("utf-8")


def test_figures_carry_every_span_once_in_few_traces(
    tmp_path: Path, wide_runs: list[Timeline], pieces: Callable[..., Timeline]
) -> None:
    timelines = [*wide_runs, pieces(2000)]
    reader = write(tmp_path, timelines)
    assert len(reader.gantts) == len(timelines)
    for timeline, figure in zip(timelines, reader.gantts, strict=True):
        lanes = [tuple(lane) for lane in figure["layout"]["meta"]["lanes"]]
        found = Counter(
            (*lanes[row], task, kind, round(base, 4), round(length, 4), num_bytes, num_flops)
            for trace in figure["data"]
            for row, base, length, (task, kind, num_bytes, num_flops) in zip(
                trace["y"], trace["base"], trace["x"], trace["customdata"], strict=True
            )
        )
        assert found == Counter(
            (
                span.rank,
                span.lane,
                span.task,
                span.kind,
                round((span.start - timeline.start) * 1e3, 4),
                round(span.seconds * 1e3, 4),
                span.num_bytes,
                span.num_flops,
            )
            for span in timeline.spans
        )
        assert len(figure["data"]) <= 12
        assert len(figure["layout"]["yaxis"]["ticktext"]) == len(lanes)


def test_all_timelines_have_the_same_axis(tmp_path: Path, runs: list[Timeline]) -> None:
    ranges = [tuple(f["layout"]["xaxis"]["range"]) for f in write(tmp_path, runs).gantts]
    assert len(set(ranges)) == 1
    assert ranges[0][1] >= max(t.seconds for t in runs) * 1e3


def test_the_chooser_offers_every_timeline_and_rank(tmp_path: Path, runs: list[Timeline]) -> None:
    reader = write(tmp_path, runs)
    values = Counter(a["value"] for tag, a in reader.elements if tag == "option")
    gantts = {k for k, f in reader.figures.items() if f in reader.gantts}
    assert values == Counter({**dict.fromkeys(gantts, 2), "all": 1, "0": 1, "1": 1})
    chosen = [a["value"] for tag, a in reader.elements if tag == "option" and "selected" in a]
    assert len(set(chosen)) == 3
    assert not any(tag == "select" for tag, _ in write(tmp_path, runs[:1]).elements)


def test_waiting_is_not_computing(runs: list[Timeline]) -> None:
    name, *times = where_row("serial@dma", runs[0])
    assert name == "serial@dma"
    assert times == pytest.approx([100.4, 50.0, 50.0, 0.0, 50.0], abs=0.05)


def test_facts_and_summary_are_shown(tmp_path: Path, runs: list[Timeline]) -> None:
    reader = write(tmp_path, runs, summary="What was seen.", facts={"ideal": "50.0 ms"})
    assert "What was seen." in reader.text
    assert "50.0 ms" in reader.text


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    evil = '</script><img src="http://x/">&"'
    spans = (Span(0, evil, evil, evil, 0.0, 1.0), Span(0, COMPUTE, "t", "matmul", 0.0, 1.0))
    timeline = Timeline(spans, evil)
    reader = write(tmp_path, [timeline, timeline], title=evil, summary=evil, facts={evil: evil})
    assert_offline(reader)
    assert len(reader.gantts) == 2
    assert evil in reader.text
    assert any(row[0] == evil for t in reader.gantts[0]["data"] for row in t["customdata"])


def test_sections_figures_and_tables_compose(tmp_path: Path) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    heat_map = {"data": [{"type": "heatmap", "z": [[1, 2]]}], "layout": {}}
    page = Page("Explore")
    page.section("Map", "Text.").figure(heat_map, height=400, min_width=600, caption="Caption.")
    page.section("Scatter").figure(go.Figure(go.Scatter(x=[1, 2], y=[3, 4])))
    page.table(["scenario", "speedup"], [["g1", 1.5], ["g2", 1.25]], best=0, caption="Speedups.")
    reader = Reader(page.write(tmp_path / "page.html"))
    assert [f["data"][0]["type"] for f in reader.figures.values()] == ["heatmap", "scatter"]
    assert "template" not in reader.figures["figure-2"]["layout"]
    assert sum(tag == "section" for tag, _ in reader.elements) == 2
    for text in ("Map", "Text.", "Caption.", "Scatter", "scenario", "1.25", "Speedups."):
        assert text in reader.text
    numbers = [a.get("class") for tag, a in reader.elements if tag == "td"]
    assert numbers == [None, "number", None, "number"]
    assert sum(a.get("class") == "best" for tag, a in reader.elements if tag == "tr") == 1


@pytest.mark.parametrize("timelines", [[], [Timeline(())], [Timeline(()), Timeline(())]])
def test_nothing_recorded_is_no_error(tmp_path: Path, timelines: list[Timeline]) -> None:
    assert_offline(write(tmp_path, timelines))


def test_a_page_without_figures_needs_no_plotly(tmp_path: Path) -> None:
    assert Reader(Page("Words").text("Only words.").write(tmp_path / "w.html")).scripts == []


def test_a_failure_while_writing_leaves_what_was_there(
    tmp_path: Path, runs: list[Timeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(Unsupported, match=r"cannot write .*page\.html: No space left"):
        Page("t").timelines(runs).write(path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_an_interrupt_in_the_middle_leaves_nothing(
    tmp_path: Path, runs: list[Timeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Page) -> str:
        raise KeyboardInterrupt

    page = Page("t").timelines(runs)
    monkeypatch.setattr(Page, "_close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        page.write(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_the_page(tmp_path: Path) -> None:
    path = Page("t").write(tmp_path / "page.html")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode
