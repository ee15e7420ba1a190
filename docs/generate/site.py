"""A hook of mkdocs: files that documents link to outside of docs/ become part of the site, and
nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.js")
FOREIGN = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
LINK = re.compile(r"\]\(((?:\.\./)+)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds every file outside of docs/ that a page links to, under its path in the repository."""
    from mkdocs.structure.files import File

    wanted = set()
    for page in files.documentation_pages():
        text = Path(page.abs_src_path).read_text()
        for up, target, _ in LINK.findall(text):
            outside = _outside(page.src_uri, up + target)
            if outside is not None:
                wanted.add(outside)
    for path in sorted(wanted):
        found = File.generated(config, f"{path}", abs_src_path=str(ROOT / path))
        if path.endswith(".md"):  # as a file to read, not as a page of the site
            found = File.generated(config, f"{path}.txt", content=(ROOT / path).read_text())
        files.append(found)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links that leave docs/ to the copies in the site."""

    def within(match: re.Match[str]) -> str:
        up, target, anchor = match[1], match[2], match[3] or ""
        outside = _outside(page.file.src_uri, up + target)
        if outside is None:
            return match[0]
        if outside.endswith(".md"):
            outside, anchor = f"{outside}.txt", ""
        depth = len(PurePosixPath(page.file.src_uri).parts) - 1
        return f"]({'../' * depth}{outside}{anchor})"

    return LINK.sub(within, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """The theme would load a script from elsewhere to search in files; a page has its own."""
    return output.replace(FOREIGN, f"<script>{WORKER.read_text()}</script>")


def _outside(page: str, target: str) -> str | None:
    """The path in the repository of a file that a page of docs/ links to; None inside docs/."""
    path = normpath(f"docs/{PurePosixPath(page).parent}/{target}")
    return None if path.startswith("docs/") or not (ROOT / path).is_file() else path
