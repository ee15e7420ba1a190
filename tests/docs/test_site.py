"""The site of the documents (`make docs`): every page can be reached, and links to files outside of
docs/ become links within the site."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from generate import site

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .*: (\S+\.md)$", text.split("\nnav:\n")[1], re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(p for p in pages if not p.startswith("generate/"))


def test_links_to_files_outside_of_the_documents():
    def shown(markdown: str, page: str) -> str:
        return site.on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=page)))

    assert shown("[a](../examples/serve.py)", "tutorial.md") == "[a](examples/serve.py)"
    assert shown("[a](../../examples/moe.py)", "how-to/x.md") == "[a](../examples/moe.py)"
    assert shown("[a](../../SECURITY.md#the-model)", "how-to/x.md") == "[a](../SECURITY.md.txt)"
    assert shown("[a](../gpu.md#b)", "how-to/x.md") == "[a](../gpu.md#b)"


def test_search_loads_nothing_from_elsewhere():
    shown = site.on_post_page(f"<head>{site.FOREIGN}</head>")
    assert "https:" not in shown
    assert "window.Worker" in shown
