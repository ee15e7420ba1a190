"""CPU servers by their data sheets: what follows from the numbers, and what is refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from weft import Schedule, Unsupported
from weft.machine import load, server_names
from weft.machine.checking import check
from weft.machine.loading import file_of, read_table
from weft.machine.server import Server
from weft.machine.template import meanings, template
from weft.operation import find
from weft.simulate.cost import gemm
from weft.simulate.simulation import run

XEON = "xeon-6980p"


def own(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "my-server.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", server_names())
def test_shipped_servers_are_believed_and_say_where_numbers_come_from(name: str) -> None:
    machine, findings = check(read_table(file_of(name)), name)
    assert findings == []
    assert machine == load(name)
    lines = file_of(name).read_text().splitlines()
    assert [
        line for line in lines if " = " in line and "title" not in line and "#" not in line
    ] == []


def test_peaks_are_products_of_the_data_sheet() -> None:
    server = tomllib.loads(file_of(XEON).read_text())["server"]
    machine = load(XEON)
    assert machine.links.world == 2
    assert machine.host is not None
    assert (machine.host.cores, machine.host.threads) == (256, 128)
    assert machine.compute.peak["bfloat16"] == pytest.approx(128 * 1024 * server["clock"])
    assert machine.memory.peak_bandwidth == pytest.approx(12 * 8.8e9 * 8)
    assert machine.links.peak_bandwidth == pytest.approx(6 * 24e9 * 24 / 8)


def test_a_rank_may_be_a_numa_node(tmp_path: Path) -> None:
    file = own(tmp_path, f'base = "{XEON}"\n[server]\nranks_per_socket = 4\n')
    whole, nodes = load(XEON), load(file)
    assert nodes.links.world == 8
    assert nodes.host is not None
    assert (nodes.host.cores, nodes.host.threads) == (256, 32)
    for dtype, rate in nodes.compute.rate.items():
        assert 4 * rate == pytest.approx(whole.compute.rate[dtype])
    assert 4 * nodes.memory.bandwidth == pytest.approx(whole.memory.bandwidth)
    assert 4 * nodes.links.bandwidth == pytest.approx(whole.links.bandwidth)


def test_what_a_file_measured_replaces_what_follows(tmp_path: Path) -> None:
    file = own(tmp_path, f'base = "{XEON}"\n[memory]\nbandwidth = 5e11\n[engines]\nrow = 1e-8\n')
    machine, known = load(file), load(XEON)
    assert (machine.memory.bandwidth, machine.engines.row) == (5e11, 1e-8)
    assert machine.compute == known.compute
    assert machine.links == known.links


def test_few_rows_take_the_time_of_the_weights_in_memory() -> None:
    machine = load(XEON)
    n = k = 8192
    operation = find("matmul_all_reduce").of(1, n, k, 2, "bfloat16")
    found = run(operation.lower(Schedule.parse("serial@dma")), machine).seconds
    reading = n * (k // 2) * 2 / machine.memory.bandwidth
    assert reading < found < reading + 1e-3
    assert gemm(machine, 1, n, k // 2).memory_seconds == pytest.approx(reading, rel=0.01)
    slower = replace(
        machine, memory=replace(machine.memory, bandwidth=machine.memory.bandwidth / 4)
    )
    assert run(operation.lower(Schedule.parse("serial@dma")), slower).seconds > found + 2 * reading


def test_rows_that_are_read_in_place_cross_the_link() -> None:
    machine = load(XEON)
    operation = find("all_gather_matmul").of(8192, 128, 65536, 2, "bfloat16")
    plan = operation.lower(Schedule.parse("shard-p2p@direct"))
    found = run(plan, machine).seconds
    crossing = 8192 // 2 * 65536 * 2 / machine.links.bandwidth
    assert found > crossing
    narrow = replace(machine.links, bandwidth=machine.links.bandwidth / 4)
    assert run(plan, replace(machine, links=narrow)).seconds > 3.5 * crossing


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server]\ncors = 3\n", r"unknown key server.cors.*did you mean cores"),
        ("[server]\nsockets = 0\n", r"server.sockets must be more than 0"),
        ("[server]\ngemm_share = 55\n", r"server.gemm_share must be at most 1"),
        ("[server.flops_per_cycle]\nbfloat61 = 1\n", r"unknown dtype bfloat61"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = own(tmp_path, f'base = "{XEON}"\n' + text)
    with pytest.raises(Unsupported, match=says):
        load(file)
    machine, findings = check(read_table(file), "mine")
    assert machine is None
    assert findings[0].error


def test_missing_numbers_are_named_at_once() -> None:
    machine, findings = check({"server": {"sockets": 2}}, "mine")
    assert machine is None
    assert {"server.cores", "server.channels", "server.socket_link"} <= {f.key for f in findings}


@pytest.mark.parametrize("name", server_names())
def test_a_template_is_the_same_server_with_meanings(name: str, tmp_path: Path) -> None:
    known = load(name)
    file = own(tmp_path, template(file_of(name).read_text(), name, known.title, "my-server.toml"))
    assert load(file) == replace(known, name="my-server")
    assert not {f"server.{key}" for key in Server.__dataclass_fields__} - set(meanings())
    assert "# memory channels\nchannels = 12" in file.read_text()
