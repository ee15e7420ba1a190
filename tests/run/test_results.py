"""Memory for results: it is used again when the last tensor on it is gone, and never before."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from weft import Unsupported
from weft.run.results import LEAST, Results, _limit, empty

COUNT = LEAST  # elements of float32, so four times the least size
MIB = 1 << 20


@pytest.fixture
def results():
    return Results(64 * MIB)


def made(results: Results, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return results.empty((count,), dtype, count * dtype.itemsize)


def test_memory_is_used_again(results):
    first = made(results)
    address = first.data_ptr()
    assert made(results).data_ptr() != address
    del first
    assert made(results).data_ptr() == address
    other = made(results, 2 * COUNT, torch.bfloat16)  # as many bytes
    assert other.data_ptr() == address
    assert (other.dtype, other.shape) == (torch.bfloat16, (2 * COUNT,))


KEEPERS = {
    "view": lambda y: y[3:9],
    "detached": lambda y: y.detach(),
    "numpy": lambda y: y.numpy(),
    "storage": lambda y: y.untyped_storage(),
    "graph": lambda y: torch.ones(COUNT, requires_grad=True) * y,
    "dlpack": lambda y: torch.utils.dlpack.to_dlpack(y),
    "copied object": lambda y: copy.copy(y),
    "copy on write": lambda y: torch._lazy_clone(y),
    "shared memory": lambda y: y.share_memory_()[:1],
}


@pytest.mark.parametrize("how", KEEPERS)
def test_memory_that_somebody_uses_is_not_given_away(results, how):
    first = made(results).fill_(1.0)
    address = first.data_ptr()
    keeper = KEEPERS[how](first)
    address = first.data_ptr() if how == "shared memory" else address
    del first
    assert all(made(results).fill_(2.0).data_ptr() != address for _ in range(3))
    del keeper


def test_memory_that_was_freed_by_hand_is_not_given(results):
    first = made(results)
    first.untyped_storage().resize_(0)  # as FSDP frees parameters
    del first
    assert made(results).fill_(1.0).sum() == COUNT


def test_no_more_is_kept_than_the_limit():
    results = Results(4 * 4 * COUNT)
    held = [made(results) for _ in range(10)]
    assert results._bytes == 4 * 4 * COUNT
    addresses = {y.data_ptr() for y in held[-4:]}
    del held
    again = [made(results) for _ in range(4)]
    assert {y.data_ptr() for y in again} == addresses  # the last ones
    del again
    made(results, 3 * COUNT)  # another size takes the place of three
    assert results._bytes == 4 * 4 * COUNT
    assert made(Results(0)).fill_(1.0).sum() == COUNT


def test_modes_do_not_stay_with_the_memory(results):
    with torch.inference_mode():
        first = made(results)
        assert first.is_inference()
    address = first.data_ptr()
    del first
    second = made(results).fill_(1.0)
    assert second.data_ptr() == address
    assert not second.is_inference()
    assert (torch.ones(COUNT, requires_grad=True) * second).requires_grad


def test_threads_get_memory_of_their_own(results):
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            y = made(results).fill_(number)
            if not bool((y == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_small_results_are_plain():
    y = empty((8, 4), torch.float16, torch.device("cpu"))
    assert (y.shape, y.dtype) == ((8, 4), torch.float16)


@pytest.mark.parametrize("wrong", ["much", "-5", "1.5", "9" * 5000])
def test_a_wrong_limit_is_refused(monkeypatch, wrong):
    monkeypatch.setenv("WEFT_RESULTS", wrong)
    with pytest.raises(Unsupported, match="WEFT_RESULTS must be a whole number of MiB"):
        _limit()


@pytest.mark.parametrize(("text", "limit"), [("", 256), ("0", 0), ("17", 17)])
def test_a_limit_is_a_number_of_mib(monkeypatch, text, limit):
    monkeypatch.setenv("WEFT_RESULTS", text)
    assert _limit() == limit * MIB
