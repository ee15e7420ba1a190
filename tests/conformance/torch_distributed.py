"""PyTorch's own suite of torch.distributed on the backend "weft": `make conformance` runs it.

The suite is the one that PyTorch ships (`torch.testing._internal.distributed.distributed_test`). It
knows PyTorch's backends by name, and leaves out what each of them cannot do. Here it is told that
weft can do what gloo and MPI can on CPUs; nothing else in it is changed. It is no part of the
ordinary tests, for it takes many minutes: each test starts four processes (WORLD_SIZE) of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from types import ModuleType

import pytest

BACKEND = "weft"
SUITE = "torch.testing._internal.distributed.distributed_test"

os.environ["BACKEND"] = BACKEND
os.environ.setdefault("WORLD_SIZE", "4")
_folder = os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="weft-conformance-"))
os.environ.setdefault("INIT_METHOD", f"file://{_folder}/shared_init_file")
sys.argv = sys.argv[:1]  # PyTorch's test utilities parse what they find there

pytest.importorskip("expecttest", reason="PyTorch's test utilities need expecttest")

import torch  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

import weft  # noqa: E402, F401  (registers the backend)

CANNOT = {
    "test_sparse_all_reduce": "weft's collectives take dense tensors",
    "test_monitored_barrier": "PyTorch itself has monitored_barrier for gloo alone",
}
"""How the names of tests begin whose subject only gloo or MPI has, with the reason."""

GLOO_WORDS = '" (Timed out|closed|timeout) "'
WORDS = '"(Timed out|closed|timeout|waited [15] s)"'
"""What a barrier says that nobody else came to, by gloo and by weft."""


def widened(source: str) -> str:
    """The suite's text, where weft may do what gloo or MPI may."""
    source = re.sub(r'BACKEND != "(gloo|mpi)"', rf'BACKEND not in ("\1", "{BACKEND}")', source)
    source = source.replace('BACKEND == "gloo"', f'BACKEND in ("gloo", "{BACKEND}")')
    assert GLOO_WORDS in source
    return source.replace(GLOO_WORDS, WORDS).replace(
        '@require_backend_is_available({"gloo"})',
        f'@require_backend_is_available({{"gloo", "{BACKEND}"}})',
    )


def load() -> ModuleType:
    """The suite, for this backend."""
    for feature in ("ddp", "gpu", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(BACKEND)
    # Groups of two ranks are made of any four, as with MPI; for others PyTorch asks for eight.
    common_distributed.skip_if_small_worldsize = lambda function: function
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None
    assert spec.origin is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SUITE] = module
    with open(spec.origin) as file:
        code = compile(widened(file.read()), spec.origin, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


_suite = load()


class TestTorchDistributed(  # type: ignore[misc, name-defined]
    _suite.TestDistBackend, _suite.DistributedTest._DistTestBase
):
    """Every test of the suite, on ranks that are forked from this process."""

    def setUp(self) -> None:
        for beginning, reason in CANNOT.items():
            if self._testMethodName.startswith(beginning):
                self.skipTest(reason)
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
