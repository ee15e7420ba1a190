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
WIDTH = 96
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
    """The call with types and defaults, one argument per line where it is long."""
    signature = inspect.signature(inspect.unwrap(function))  # type: ignore[arg-type]
    shown = [p for p in signature.parameters.values() if p.name != "self"]
    whole = signature.replace(parameters=shown)
    made = whole.return_annotation
    returned = "" if made is whole.empty else f" -> {_written(made)}"
    parts = _arguments(whole)
    line = f"{name}({', '.join(parts)}){returned}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _arguments(signature: inspect.Signature) -> list[str]:
    parts: list[str] = []
    keyword_only = False
    for one in signature.parameters.values():
        if one.kind is one.VAR_POSITIONAL:
            keyword_only = True
        elif one.kind is one.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        parts.append(_argument(one))
    return parts


def _argument(one: inspect.Parameter) -> str:
    stars = "*" * ((one.kind is one.VAR_POSITIONAL) + 2 * (one.kind is one.VAR_KEYWORD))
    told = "" if one.annotation is one.empty else f": {_written(one.annotation)}"
    if one.default is one.empty:
        return f"{stars}{one.name}{told}"
    return f"{stars}{one.name}{told}{' = ' if told else '='}{one.default!r}"


def _written(annotation: object) -> str:
    """A type as it stands in the source, where annotations are kept as text."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _block(heading: str, thing: object) -> str:
    doc = inspect.getdoc(thing) or ""
    body = "\n\n".join(part for part in (heading, doc) if part)
    return f"```text\n{body}\n```\n"


if __name__ == "__main__":
    TARGET.write_text(render())
