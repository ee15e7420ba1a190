"""Ranks on hosts of their own: network namespaces on this machine, joined by a switch."""

from __future__ import annotations

import multiprocessing

import pytest
from network_ranks import HostPool

from weft.measure.hosts import Hosts, missing


@pytest.fixture(scope="session")
def hosts_possible():
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def on_hosts(hosts_possible, pools):
    """`on_hosts(2, 4)`: the hosts, and a pool of ranks shared out over them. pools: has the server
    that forks ranks import once what all of them need."""
    made = []

    others = set(multiprocessing.active_children())  # pools that all tests share

    def make(count, world, wire=None, **environment):
        hosts = Hosts(count, wire).__enter__()
        made.append(hosts)
        pool = HostPool(hosts, world, environment)
        made.append(pool)
        return hosts, pool

    yield make
    for thing in reversed(made):
        thing.close()
    assert set(multiprocessing.active_children()) <= others
