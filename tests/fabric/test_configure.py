"""`weft.configure`, and variables that are read with the first call: wrong ones change nothing."""

from __future__ import annotations

import pytest
import torch
from ranks import check_call

import weft
from weft import Link, Unsupported, fabric
from weft.fabric import _native


class Odd:
    def __float__(self) -> float:
        raise RuntimeError("no number")


WRONG = (
    ({"link": 5}, "link must be memory, a rate"),
    ({"link": b"memory"}, "link must be memory, a rate"),
    ({"link": "fast"}, "'fast' is not a link"),
    ({"deadline": True}, "deadline must be a number of seconds"),
    ({"deadline": Odd()}, "deadline must be a number of seconds"),
    ({"deadline": torch.ones((), device="meta")}, "deadline must be a number of seconds"),
    ({"select": 3}, "no way to select 3"),
    ({"select": b"model"}, "no way to select b'model'"),
    ({"select": []}, "no way to select"),
)


def all_or_nothing() -> None:
    here = fabric.of()
    before = here.link, here.deadline
    for wrong, said in WRONG:
        right = {"link": Link(1e9), "deadline": 7.0, "select": "model"}
        with pytest.raises(Unsupported, match=said) as refused:
            weft.configure(**{**right, **wrong})
        assert "\n" not in str(refused.value)
        assert (here.link, here.deadline) == before
        check_call(8, 3, 4)
        check_call(8, 3, 4, schedule="auto")
    weft.configure(link="1GB/s", deadline=50, select="heuristic")
    assert (here.link, here.deadline) == (Link(1e9), 50.0)
    check_call(8, 3, 4)


def test_a_wrong_argument_changes_nothing(renewed_ranks):
    renewed_ranks(2).run(all_or_nothing)


def set_no_link() -> None:
    here = fabric.of()
    before = here.link
    with pytest.raises(AttributeError):
        here.set_link(5)
    assert here.link is before
    check_call(8, 3, 4, schedule="auto")


def test_a_link_is_kept_if_another_cannot_be_set(ranks):
    ranks(2).run(set_no_link)


def wrong_kernels() -> None:
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"WEFT_KERNELS is 'portabel' \(did you mean portab"):
            weft.matmul_all_reduce(torch.ones(1, 64), torch.ones(64, 600))


def test_kernels_that_do_not_exist(fresh_ranks):
    fresh_ranks(2, WEFT_KERNELS="portabel").run(wrong_kernels)


def known_kernels() -> str:
    found = weft.matmul_all_reduce(torch.ones(1, 64), torch.ones(64, 600), schedule="in-kernel")
    assert torch.equal(found, torch.full((1, 600), 128.0))
    [runner, *_] = weft.run.session.of(fabric.of()).runners.values()
    return runner.program.variant


@pytest.mark.parametrize("name", ["", *_native.kernel_names()])
def test_kernels_that_exist(fresh_ranks, name):
    assert fresh_ranks(2, WEFT_KERNELS=name).run(known_kernels) == [name, name]
