"""`python docs/generate/reference.py` writes docs/reference.md from all public docstrings.

A test checks that the file is up to date.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import weft
import weft.nn

TARGET = Path(__file__).parents[1] / "reference.md"
HEAD = """# Reference

Everything public, from its docstrings. Written by `python docs/generate/reference.py`.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, "## weft\n", *_members(weft), "## weft.nn\n", *_members(weft.nn)]
    return "\n".join(parts)


def _members(module: ModuleType) -> list[str]:
    kinds: dict[str, list[str]] = {"function": [], "class": [], "error": []}
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            continue
        if module is weft.nn and name in weft.__all__:
            continue
        title = f"### {module.__name__}.{name}\n"
        if inspect.isclass(thing):
            kind = "error" if issubclass(thing, Exception) else "class"
            kinds[kind].append("\n".join([title, *_class(thing)]))
        else:
            kinds["function"].append("\n".join([title, _block(_heading(name, thing), thing)]))
    return [*kinds["function"], *kinds["class"], *kinds["error"]]


def _class(kind: type) -> list[str]:
    if kind.__module__.split(".")[0] != "weft":
        return [f"`{kind.__module__}.{kind.__qualname__}`, as it is.\n"]
    parts = [_block("", kind)]
    for name, member in sorted(vars(kind).items()):
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if name.startswith("_") or not inspect.getdoc(function):
            continue
        if isinstance(function, property):
            parts.append(_block(f"{name}  (property)", function))
        elif inspect.isfunction(function):
            parts.append(_block(_heading(name, function), function))
    return parts


def _heading(name: str, function: object) -> str:
    signature = inspect.signature(inspect.unwrap(function))  # type: ignore[arg-type]
    shown = [
        p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"
    ]
    return f"{name}{signature.replace(parameters=shown, return_annotation=signature.empty)}"


def _block(heading: str, thing: object) -> str:
    doc = inspect.getdoc(thing) or ""
    body = "\n\n".join(part for part in (heading, doc) if part)
    return f"```text\n{body}\n```\n"


if __name__ == "__main__":
    TARGET.write_text(render())
