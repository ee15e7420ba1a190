"""The words of the language by themselves, over a table of pointers of one's own."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

import weft
from weft.triton import Pointers, get, kernel, peer, put, signal, signal_add, wait
from weft.triton.language import WAITED, dot


@kernel
def exchange(mine, counters, status, bases, me, BLOCK: tl.constexpr):  # noqa: N803
    """Puts a row to the other rank, signals, waits for its row, and reads one back."""
    other = 1 - me
    lanes = tl.arange(0, BLOCK)
    put(mine + lanes, lanes + 10 * me, other, bases, me, mask=lanes < 5)
    signal(counters, 7, other, bases, me)
    signal_add(counters + 1, 2, other, bases, me)
    signal_add(counters + 1, 2, other, bases, me, sem="relaxed", scope="gpu")
    value = get(mine + 4, other, bases, me)
    tl.store(peer(mine, me, bases, me) + 6, value)


@kernel
def waiting(counters, status, TARGET: tl.constexpr):  # noqa: N803
    arrived = wait(counters, TARGET, 3, status, 1, 0)
    tl.store(counters + 1, arrived.to(tl.int64))


@kernel
def product(x, w, y, BLOCK: tl.constexpr):  # noqa: N803
    places = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    sums = dot(tl.load(x + places), tl.load(w + places), tl.load(y + places), "ieee")
    tl.store(y + places, sums)


def two_ranks():
    """Both ranks' memory in this process: a table may hold any pointers."""
    memory = torch.zeros(2, 64, dtype=torch.int64)
    bases = torch.tensor([row.data_ptr() for row in memory])
    return memory, bases


def test_put_get_and_signals():
    memory, bases = two_ranks()
    status = torch.zeros(8, dtype=torch.int64)
    for me in (0, 1):
        exchange.interpreted[(1,)](memory[me], memory[me][32:], status, bases, me, 8)
    assert memory[1][:8].tolist() == [0, 1, 2, 3, 4, 0, 14, 0]
    assert memory[0][:8].tolist() == [10, 11, 12, 13, 14, 0, 4, 0]
    assert memory[:, 32:34].tolist() == [[7, 4], [7, 4]]
    assert status.tolist() == [0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_interpreted_product_has_the_same_bits_everywhere_in_a_tile(dtype):
    """The kernels rely on it: a row is in one place of a tile on its own rank, and in another where
    it is part of a chunk. A BLAS does not promise it."""
    generator = torch.Generator().manual_seed(0)
    x, w, first = (torch.randn(32, generator=generator) for _ in range(3))
    x, w = x.to(dtype), w.to(dtype)
    y = first[0].repeat(32, 32)
    product.interpreted[(1,)](x.repeat(32, 1), w[:, None].repeat(1, 32), y, 32)
    total = first[0]
    for k in range(32):
        total = total + x[k].float() * w[k].float()
    assert torch.equal(y, total.expand(32, 32))


@pytest.mark.parametrize(("value", "arrived"), [(2, 0), (3, 1), (4, 1)])
def test_wait_has_a_bound_and_says_what_it_waited_for(value, arrived):
    counters = torch.tensor([value, -1])
    status = torch.zeros(8, dtype=torch.int64)
    waiting.interpreted[(1,)](counters, status, 3)
    assert counters.tolist() == [value, arrived]
    assert status.tolist()[:5] == ([0] * 5 if arrived else [WAITED.value, 1, 0, 3, value])


def test_after_one_wait_gave_up_no_other_waits_long():
    counters = torch.tensor([0, -1])
    status = torch.zeros(8, dtype=torch.int64)
    status[0] = WAITED.value
    status[1] = 5
    waiting.interpreted[(2,)](counters, status, 3)
    assert status.tolist()[:2] == [WAITED.value, 5]  # the first to give up is heard


def test_the_same_source_is_compiled_and_interpreted_in_one_process(tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"counters": "*i64", "status": "*i64", "TARGET": "constexpr"}
    for _ in range(2):
        source = ASTSource(waiting, signature, constexprs={"TARGET": 3})
        compiled = triton.compile(source, target=GPUTarget("hip", "gfx942", 64))
        assert "s_sleep" in compiled.asm["amdgcn"]
        counters = torch.tensor([3, -1])
        waiting.interpreted[(1,)](counters, torch.zeros(8, dtype=torch.int64), 3)
        assert counters.tolist() == [3, 1]


def test_pointers_are_checked():
    memory = torch.zeros(1024, dtype=torch.uint8)
    base = memory.data_ptr()
    for arguments, words in [
        ((memory.view(torch.int8), [base], 0), "tensor of bytes"),
        ((memory, [base], 1), "own memory"),
        ((memory, [base, base + 8], 0), "multiple of 256"),
    ]:
        with pytest.raises(weft.Unsupported, match=words):
            Pointers(*arguments, exchange=lambda said: [said])


def test_importing_without_triton_is_one_sentence():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import weft\n"
        "try:\n    import weft.triton\n"
        "except ImportError as error:\n"
        "    assert isinstance(error, weft.Error); print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "weft.triton needs Triton, which is not installed; run: pip install 'weft[triton]'\n"
    )
