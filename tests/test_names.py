"""One name for one thing: no two files and no two public classes of weft share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import weft

ROOT = Path(weft.__file__).parent

# An operator's file has the same name in each of these layers: what users call, its plan, its
# kernels. Files of commands and benchmarks have the names that users type.
LAYERS = {"ops", "plan", "triton", "triton/kernels"}
TYPED = {"cli", "benchmarks"}
SHARED_CLASSES = {"EmbeddingAllToAll"}  # the operation, and the public kernel of the same operator


def _shared(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, place in pairs:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_files_share_a_name():
    files = [path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.name != "__init__.py"]
    named = [
        (path.name, "a layer" if path.parent.as_posix() in LAYERS else path.as_posix())
        for path in files
        if path.parent.as_posix() not in TYPED
    ]
    assert _shared(dict.fromkeys(named)) == {}


def test_no_two_public_classes_share_a_name():
    classes = [
        (statement.name, path.relative_to(ROOT).as_posix())
        for path in ROOT.rglob("*.py")
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_")
    ]
    shared = _shared(classes)
    assert set(shared) == SHARED_CLASSES, shared
