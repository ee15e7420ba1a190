"""Workloads: training steps on clusters, plain and fused. A workload is a file in this folder with
a frozen dataclass of sizes (`CONFIG`), and a function `step(config, cluster, size, chunks)` that
lists the kernels and collectives of a device.

Sizes and assumptions are in TOML files next to it, which a user's own file can replace.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import Unsupported, nearest
from weft.machine.loading import build
from weft.machine.toml_file import read_toml

FOLDER = Path(__file__).parent
WORKLOADS = ("dlrm", "llama", "moe")


@dataclass(frozen=True)
class Workload:
    """A workload and its sizes. `module` has the functions `step`, `size_of` and `describe`."""

    name: str
    config: Any
    path: Path
    module: Any


def models(workload: str) -> list[str]:
    """The names of the sizes of a workload that come with weft. The first is the default."""
    found = sorted(path.stem for path in FOLDER.glob(f"{workload}*.toml"))
    return sorted(found, key=lambda name: name != workload)


def load_workload(name: str, model: str | None = None) -> Workload:
    """A workload with sizes that come with weft, by name, or from a TOML file."""
    if name not in WORKLOADS:
        raise Unsupported(
            f"there is no workload {name!r}{nearest(name, WORKLOADS)};"
            f" known: {', '.join(WORKLOADS)}"
        )
    module = importlib.import_module(f"{__name__}.{name}")
    path = (
        FOLDER / f"{model or name}.toml" if model is None or model in models(name) else Path(model)
    )
    if not os.path.isfile(path):
        raise Unsupported(
            f"there is no model {model!r} of {name}{nearest(str(model), models(name))};"
            f" known: {', '.join(models(name))}, and any TOML file by its path"
        )
    config = build(module.CONFIG, read_toml(path), path.name)
    module.check(config, path.name)
    return Workload(name, config, path, module)
