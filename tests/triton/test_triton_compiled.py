"""Compiled for GPUs that are not here: the code has what correctness needs, and fits.

Every kernel is compiled for every target in bfloat16, in float32 for gfx942 and in float16 for
gfx950; `weft triton report` does the whole matrix.
"""

from __future__ import annotations

import json

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource
from typer.testing import CliRunner

import weft
from weft.triton import ahead, kernel, signal_add, wait
from weft.triton.audit import audit, audit_amdgcn, audit_ptx
from weft.triton.residency import Resources, programs_per_unit, unit_of
from weft.triton.resident_launch import Tiles

MATRIX = [
    *[(target, "bfloat16") for target in ahead.TARGETS],
    ("gfx942", "float32"),
    ("gfx950", "float16"),
]
FLAGS = {  # releases and acquires in the source; a compiler may repeat one, never drop it
    "embedding_all_to_all": (2, 2),
    "gemv_all_reduce": (2, 4),
    "gemm_all_to_all": (2, 2),
    "all_gather_gemm": (0, 2),
    "all_gather_gemm_claim": (0, 1),
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def matrix():
    for name in ahead.KERNELS:
        yield from ((name, target, dtype, 64) for target, dtype in MATRIX)
    # The device fabric's words.
    yield from (("all_gather_gemm_claim", target, "bfloat16", 32) for target in ahead.TARGETS)


@pytest.mark.parametrize(("name", "target", "dtype", "bits"), [*matrix()])
def test_flags_are_released_and_acquired_for_the_whole_system(name, target, dtype, bits):
    built = ahead.build(name, target, dtype, counter_bits=bits)
    found = audit(built)
    assert found.faults == ()
    releases, acquires = FLAGS[name]
    assert found.releases >= releases
    assert found.acquires >= acquires
    if releases == 0:
        assert found.releases == 0
    if target.startswith("sm"):
        assert ".sys" in built.assembly
        assert "nanosleep" in built.assembly
    else:
        assert "buffer_inv sc0 sc1" in built.assembly
        assert ("buffer_wbl2 sc0 sc1" in built.assembly) == (releases > 0)
        assert "s_sleep" in built.assembly
    assert built.resources.spilled == 0
    assert built.resources.registers
    assert programs_per_unit(built.resources, unit_of(target)) >= 1


@kernel
def careless(data, flag, BLOCK: tl.constexpr, BARRIER: tl.constexpr, SCOPE: tl.constexpr):  # noqa: N803
    """How a flag is set in plain Triton."""
    tl.store(data + tl.arange(0, BLOCK), 1.0)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope=SCOPE)


@kernel
def careful(data, flag, bases, status, BLOCK: tl.constexpr):  # noqa: N803
    tl.store(data + tl.arange(0, BLOCK), 1.0)
    signal_add(flag, 1, 1, bases, 0)
    wait(flag, 1, 5, status, 1, 0)
    tl.store(data, tl.load(data + 5))


def assembly(function, target, **constants):
    signature = {name: "constexpr" if name in constants else "*i64" for name in function.arg_names}
    signature["data"] = "*fp32"
    source = ASTSource(function, signature, constexprs=constants)
    compiled = triton.compile(source, target=ahead.TARGETS[target])
    return compiled.asm["ptx"] if target.startswith("sm") else compiled.asm["amdgcn"]


def test_the_audit_finds_what_plain_triton_leaves_out():
    """On AMD a barrier lets a wave pass whose stores are under way: `signal` waits for them."""
    text = assembly(careless, "gfx942", BLOCK=1024, BARRIER=True, SCOPE="sys")
    found = audit_amdgcn(text)
    assert found.releases == 1
    assert all("passed the barrier with a store under way" in fault for fault in found.faults)
    assert found.faults
    text = assembly(careful, "gfx942", BLOCK=1024)
    assert (audit_amdgcn(text).releases, audit_amdgcn(text).faults) == (1, ())
    assert audit_amdgcn(text.replace("buffer_wbl2 sc0 sc1", "s_nop 0")).faults
    assert audit_amdgcn(text.replace("buffer_inv sc0 sc1", "s_nop 0")).faults
    assert audit_amdgcn(text.replace("s_barrier", "s_nop 0")).faults


def test_the_audit_finds_a_flag_for_less_than_the_system():
    text = assembly(careless, "sm_90", BLOCK=1024, BARRIER=True, SCOPE="gpu")
    assert audit_ptx(text).releases == 0
    text = assembly(careful, "sm_90", BLOCK=1024)
    found = audit_ptx(text)
    assert (found.releases, found.faults) == (1, ())
    assert found.acquires >= 1
    assert any(
        "no barrier" in f or "stored" in f
        for f in audit_ptx(text.replace("bar.sync", "nop")).faults
    )


def test_every_compute_unit_gets_what_fits():
    light = Resources(registers=32, spilled=0, shared=0, warps=4)
    assert programs_per_unit(light, unit_of("gfx942")) == 8  # 8 waves on each of 4 SIMDs
    assert programs_per_unit(light, unit_of("sm_90")) == 16  # 64 warps
    heavy = Resources(registers=255, spilled=0, shared=100 * 1024, warps=8)
    assert programs_per_unit(heavy, unit_of("sm90")) == 1  # 65536 registers / (256 * 256)
    assert programs_per_unit(heavy, unit_of("gfx942:sramecc+")) == 0  # LDS is 64 KiB
    assert programs_per_unit(heavy, unit_of("gfx950")) == 1
    assert programs_per_unit(Resources(512, 0, 0, 4), unit_of("gfx942")) == 1
    assert programs_per_unit(Resources(16, 0, 0, 1), unit_of("sm_100")) == 32
    assert programs_per_unit(Resources(None, None, 65536, 4), unit_of("sm_100")) == 3
    with pytest.raises(weft.Unsupported, match="gfx906"):
        unit_of("gfx906")


def test_report():
    from weft.cli.triton import app

    chosen = ["--kernels", "embedding_all_to_all", "--targets", "gfx942,sm_90"]
    done = CliRunner().invoke(app, ["report", *chosen, "--dtypes", "bfloat16", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["kernels"]
    assert [(row["target"], row["faults"]) for row in rows] == [("gfx942", []), ("sm_90", [])]
    assert all(row["registers"] > 0 and row["programs_per_unit"] > 0 for row in rows)
    done = CliRunner().invoke(app, ["report", *chosen, "--dtypes", "bfloat16"])
    assert done.exit_code == 0
    assert "but not run" in done.stdout.replace("\n", " ")
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gemm", "gfx942", "float32"), "gemm_all_to_all"),
        (("gemm_all_to_all", "gfx94", "float32"), "gfx942"),
        (("gemm_all_to_all", "gfx942", "int8"), "float16"),
    ],
)
def test_unknown_names(arguments, words):
    with pytest.raises(weft.Unsupported, match=words):
        ahead.build(*arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", ahead.KERNELS)
def test_on_the_gpus_that_are_here(name):
    """As `weft doctor --gpu` does, one rank per GPU."""
    from weft.measure.launch import launch

    world = min(torch.cuda.device_count(), 8)
    assert all(launch(world, _on_gpu, name, pin=False))


def _on_gpu(report, name):
    import torch.distributed as dist

    from weft.triton import symmetric_memory
    from weft.triton.checks import CHECKS, KernelCase
    from weft.triton.resident_launch import DTYPES

    torch.cuda.set_device(dist.get_rank())
    space = symmetric_memory(64 << 20)
    return all(CHECKS[name](space, KernelCase(dtype)) for dtype in DTYPES)


def test_tiles_are_what_a_launch_has():
    assert ahead.default_tiles("gemm_all_to_all", "gfx942", torch.float32) == Tiles(k=32)
    assert ahead.default_tiles("gemm_all_to_all", "sm_90", torch.float16) == Tiles(k=64)
