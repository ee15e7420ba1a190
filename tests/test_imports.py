"""Importing weft is free of side effects: no threads, no processes, no group, nothing optional."""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
LAYERS = ("weft.cli", "weft.report", "weft.study", "weft.measure", "weft.models")
import json, os, sys
import torch, torch.distributed as dist
threads = len(os.listdir("/proc/self/task"))
files = len(os.listdir("/proc/self/fd"))
import weft
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(json.dumps({
    "threads": len(os.listdir("/proc/self/task")) - threads,
    "files": len(os.listdir("/proc/self/fd")) - files,
    "children": len(children),
    "group": dist.is_initialized(),
    "explained": weft.explain() is not None,
    "optional": [m for m in ("plotly", "rich", "typer", "triton", "pandas") if m in sys.modules],
    "layers": [m for m in sys.modules if m.startswith(LAYERS)],
    "missing": [name for name in weft.__all__ if not hasattr(weft, name)],
}))
"""


def test_importing_weft_has_no_side_effects():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == {
        "threads": 0,
        "files": 0,
        "children": 0,
        "group": False,
        "explained": False,
        "optional": [],
        "layers": [],
        "missing": [],
    }
    assert done.stderr == ""


def test_plans_need_no_torch():
    """Operations, schedules and plans are pure data."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'src')\n"
        "import importlib.util, types\n"
        "package = types.ModuleType('weft'); spec = importlib.util.find_spec('weft')\n"
        "package.__path__ = list(spec.submodule_search_locations); sys.modules['weft'] = package\n"
        "from weft.plan.all_gather_matmul import AllGatherMatmul\n"
        "from weft.plan.verify import verify\n"
        "from weft.schedule import Schedule\n"
        "import weft.plan.interpret, weft.timeline\n"
        "op = AllGatherMatmul.of(8, 4, 4, 2)\n"
        "[verify(op.lower(s)) for s in Schedule.space(op)]\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr
