"""`weft bench cluster`: every promise is a row and a check, and a miss is a miss."""

from __future__ import annotations

import json

import pytest

from weft.benchmarks import cluster
from weft.simulate.cluster import ask
from weft.study.clusters import GIB, sample


def test_checks_follow_from_what_was_simulated(weft, monkeypatch: pytest.MonkeyPatch) -> None:
    near = ask(sample("switch", "switch", 2), "all_to_all", 16 * GIB)[0]
    far = ask(sample("mesh", "switch", 2), "all_gather", 4096.0)[0]  # latency counts here
    monkeypatch.setattr(cluster, "near_the_bound", lambda: iter([near, far]))
    monkeypatch.setattr(cluster, "how_long", lambda nodes: 0.5)
    monkeypatch.setattr(cluster, "_workloads", lambda rows, checks, report: None)
    done = weft("bench", "cluster", "--json")
    assert done.returncode == 1  # the small all-gather is far from its bound
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["all_to_all, 1-16 nodes of 8: most over the bound"]["ok"]
    assert not checks["all_gather, 1-16 nodes of 8: most over the bound"]["ok"]
    assert checks["against ASTRA-sim: largest error"]["value"] < 0.005
    assert checks["two at once: largest error against half a link each"]["ok"]
    assert checks["1024 nodes: seconds to simulate 4 collectives"]["value"] == 0.5
