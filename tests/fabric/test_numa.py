"""A rank's memory is on its own NUMA node where there are several; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.doctor_cpu import processors
from weft.fabric.host import numa, opening


def tree(folder: Path, *lists: str) -> Path:
    """A folder as the kernel has it, with these cores on its nodes."""
    for number, cores in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    return folder


def test_nodes_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    found = numa.nodes(tree(tmp_path, "0-2,8", "3", ""))
    assert found == {0: {0, 1, 2, 8}, 1: {3}}, "a node without cores has memory only"
    assert numa.nodes(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("lists", "cores", "node"),
    [
        (("0-3", "4-7"), {4, 6}, 1),
        (("0-3", "4-7"), {0, 1, 2, 3}, 0),
        (("0-3", "4-7"), {3, 4}, None),
        (("0-3",), {1}, None),
        ((), {1}, None),
    ],
)
def test_the_node_is_that_of_all_cores(tmp_path, lists, cores, node) -> None:
    assert numa.node_of(numa.nodes(tree(tmp_path, *lists)), cores) == node


def policy_of(address: int) -> tuple[int, int]:
    """The policy of a page, and the first word of its nodes."""
    call = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * 16)()
    by_address = 2
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    taken = syscall(
        ctypes.c_long(call),
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(1024),
        ctypes.c_void_p(address),
        ctypes.c_ulong(by_address),
    )
    if taken != 0:
        pytest.skip("this system does not tell the policy of memory")
    return mode.value, mask[0]


def test_shared_pages_prefer_the_node_of_their_rank(tmp_path: Path) -> None:
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    several = tree(tmp_path, own, "4000")
    with mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_SHARED) as pages:
        address = ctypes.addressof(here := ctypes.c_char.from_buffer(pages))
        assert policy_of(address) == (0, 0), "the default: where it is touched first"
        node = numa.keep_near(address, len(pages), several)
        if node is None:
            pytest.skip("this system does not let a process choose the node of its memory")
        assert node == 0
        assert policy_of(address + 3 * mmap.PAGESIZE) == (1, 1)
        pages[:] = b"1" * len(pages)
        del here


def test_what_cannot_be_chosen_is_left_alone(tmp_path: Path) -> None:
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert numa.keep_near(0, 1, tree(tmp_path, own)) is None, "one node"
    (tmp_path / "other").mkdir()
    several = tree(tmp_path / "other", own, "4000")
    assert numa.keep_near(1, mmap.PAGESIZE, several) is None, "no address of a page"


NODES = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


def said(nodes, cores, threads, **environment) -> dict[str, tuple[str, str]]:
    lines = processors(nodes, cores, threads, environment)
    return {what: (found, remedy) for what, found, remedy in lines}


@pytest.mark.parametrize("bound", [{}, {"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}])
@pytest.mark.parametrize("pinned", [False, True])
def test_cores_of_a_rank_whose_first_thread_openmp_binds(bound, pinned) -> None:
    """OpenMP binds the thread that loads it to a core of its own; the rank still has the others."""
    cores = os.sched_getaffinity(0)
    own = {max(cores)} if pinned else cores
    command = f"import os; os.sched_setaffinity(0, {own}); import torch\n"
    command += "from weft.fabric.host.opening import own_cores; print(own_cores(1))"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={**environment, **bound},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(own)
    assert opening.own_cores(2 * (os.cpu_count() or 1)) == 1, "no more than its share"


ENGINES = """
import os, sys
import torch, weft

rank = int(sys.argv[1])
meeting = f"file://{os.getcwd()}/meeting"
torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
x, w = torch.ones(512, 256), torch.ones(256, 256)
for _ in range(3):
    weft.all_gather_matmul(x, w, schedule="adaptive@dma")
for thread in os.listdir("/proc/self/task"):
    if "weft-engine" in open(f"/proc/self/task/{thread}/comm").read():
        print(sorted(os.sched_getaffinity(int(thread))))
torch.distributed.destroy_process_group()
"""


def test_engines_may_leave_the_core_on_which_their_rank_computes(tmp_path: Path) -> None:
    """OpenMP binds the first thread of a rank, as numactl or taskset starts it, to one core."""
    (tmp_path / "engines.py").write_text(ENGINES)
    ranks = [
        subprocess.Popen(
            [sys.executable, "engines.py", str(rank)],
            cwd=tmp_path,
            env={**os.environ, "OMP_PROC_BIND": "true"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    every = f"{sorted(os.sched_getaffinity(0))}\n"
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == [every, every]


def test_the_doctor_says_what_to_change() -> None:
    both = said(NODES, range(8), 8)
    assert both["NUMA nodes"] == ("2: cores 0-3; cores 4-7", "")
    assert both["affinity"][0] == "cores 0-7 on node 0, 1"
    assert "numactl --cpunodebind=$LOCAL_RANK" in both["affinity"][1]
    assert both["threads per rank"][1].endswith("OMP_NUM_THREADS=4 for 2 ranks")
    pinned = said(NODES, range(4), 4, OMP_NUM_THREADS="4", LOCAL_WORLD_SIZE="1")
    assert pinned["affinity"] == ("cores 0-3 on node 0", "")
    assert pinned["threads per rank"] == ("4", "")
    many = said({0: frozenset({0, 2})}, {0, 2}, 5, OMP_NUM_THREADS="5")
    assert many["NUMA nodes"] == ("1", "")
    assert many["affinity"] == ("cores 0,2", "")
    assert "OMP_NUM_THREADS=2 or less" in many["threads per rank"][1]
