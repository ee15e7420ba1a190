"""Plugins: files and packages that extend weft by an operator, a schedule name, or a fabric.

`WEFT_PLUGINS` lists them, separated by commas: modules, or paths of Python files. Packages declare
theirs as entry points of the group `weft`. They are imported at the end of `import weft` in every
process, so that the ranks that `weft run` starts have them, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

from weft.errors import Unsupported


def load() -> None:
    """Imports all plugins. Raises `Unsupported` with the name of one that cannot be imported."""
    for entry in entry_points(group="weft"):
        _import(entry.value)
    for name in filter(None, map(str.strip, os.environ.get("WEFT_PLUGINS", "").split(","))):
        _import(name)


def _import(name: str) -> None:
    try:
        if name.endswith(".py"):
            _import_file(Path(name))
        else:
            importlib.import_module(name)
    except (Exception, SystemExit) as failure:
        raise Unsupported(
            f"the weft plugin {name} cannot be imported ({type(failure).__name__}: {failure}); "
            "mend it, or remove it from WEFT_PLUGINS"
        ) from failure


def _import_file(path: Path) -> None:
    name = f"weft_plugin_{path.stem}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError("there is no such file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
