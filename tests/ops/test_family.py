"""What holds for all five operators alike: results, dtypes, gradients, order, graphs, refusals."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from family import DTYPES, NAMES, Case, forward, gradients, same, space

import weft

FEW = ("serial@dma", "hetero-unfused-1d@cores", "adaptive@dma", "adaptive@direct")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_schedule_equals_plain_torch(ranks, name, world):
    ranks(world).run(forward, name, space(world), range(2 if world == 4 else 3))


@pytest.mark.parametrize("world", [5, 6, 7, 8])
def test_many_ranks(ranks, world):
    for name in NAMES:
        ranks(world).run(forward, name, FEW[2:], (world,), DTYPES[world % 4 :][:1])


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(ranks, name):
    ranks(3).run(forward, name, FEW, (7, 8), DTYPES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [2, 3])
def test_gradients(ranks, name, world):
    for schedule in ("adaptive@dma", "adaptive@direct") if world == 2 else ("serial@dma",):
        ranks(world).run(gradients, name, schedule, 3)


def test_gradients_on_four_ranks(ranks):
    for name in ("all_gather_matmul", "matmul_all_to_all"):
        ranks(4).run(gradients, name, "auto", 5)


def _larger(name, schedule):
    case = Case(name, 11, sizes=(200, 300))
    same(case, schedule)


@pytest.mark.parametrize("name", NAMES)
def test_many_chunks_on_a_paced_link(ranks, name):
    ranks(2).run(_on_link, "0.2GB/s", name, ("adaptive@dma", "hetero-fused-1d@dma"))


def _on_link(link, name, schedules):
    weft.configure(link=link)
    try:
        for schedule in schedules:
            _larger(name, schedule)
    finally:
        weft.configure(link="memory")


# -- two runs are equal to the last bit ------------------------------------------------------------


def _delayed_runs(name, schedule):
    rank, delays = dist.get_rank(), random.Random(dist.get_rank())
    torch.manual_seed(rank)
    case = Case(name, 4, sizes=(97, 130))
    with torch.no_grad():
        case.x.copy_(torch.randn(case.x.shape))
        case.w.copy_(torch.randn(case.w.shape))
    first = case.weft(schedule)
    for _ in range(6):
        time.sleep(delays.choice((0.0, 0.0, 0.002, 0.01)))
        assert torch.equal(case.weft(schedule), first)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("matmul")])
def test_reruns_with_delays_are_bit_equal(ranks, name):
    for schedule in ("adaptive@dma", "adaptive:5@direct", "hetero-unfused-2d@dma"):
        ranks(3).run(_delayed_runs, name, schedule)


# -- sequences that mix all operators on two overlapping groups ------------------------------------


def _sequence(seed):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])]
    common, own = random.Random(seed), random.Random(100 * seed + rank)
    for number in range(60):
        which, name = common.choice((0, 1)), common.choice(NAMES)
        schedule = common.choice(FEW)
        dtype, grad = common.choice(DTYPES), common.random() < 0.3
        case_seed = common.choice((1, 2, 3, 40 + number))
        if rank not in ((0, 1, 2), (1, 2, 3))[which]:
            continue
        if own.random() < 0.1:
            time.sleep(own.choice((0.001, 0.01)))
        case = Case(name, case_seed, dtype, groups[which], grad)
        got = case.weft(schedule)
        assert torch.equal(got.detach().double(), case.plain()), (number, name, schedule)
        if grad:
            got.sum().backward()
    dist.barrier()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_sequences_on_two_overlapping_groups(ranks, seed):
    ranks(4).run(_sequence, seed)


# -- graphs ----------------------------------------------------------------------------------------


def _opcheck(name):
    case = Case(name, 6, grad=True, sizes=(4, 6))
    group = dist.group.WORLD.group_name
    operator = getattr(torch.ops.weft, name)
    splits = (case.in_splits, case.out_splits)
    arguments = {
        "all_gather_matmul": ([case.w], 0, group),
        "matmul_reduce_scatter": (case.w, "sum", 0, group),
        "matmul_all_reduce": (case.w, "sum", group),
        "all_to_all_matmul": (case.w, *splits, group),
        "matmul_all_to_all": (case.w, *splits, group),
    }[name]
    options = {"shard_rows": None} if name == "all_gather_matmul" else {}
    torch.library.opcheck(operator.default, (case.x, *arguments), options)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(ranks, name):
    ranks(2).run(_opcheck, name)


# -- refusals --------------------------------------------------------------------------------------


def _refused(name, change):
    case = Case(name, 2, sizes=(4,))
    if dist.get_rank() == 0:
        if change == "integers":
            case.x, case.w = case.x.int(), case.w.int()
        elif change == "inner":
            case.w = torch.ones(7, 4)
        elif change == "tensor":
            case.w = None
        elif change == "dtype":
            case.w = case.w.double()
        elif change == "out":
            with pytest.raises(weft.Error):
                case.weft(out=torch.empty(3, 3))
            same(Case(name, 2, sizes=(4,)))
            return ""
        elif change == "schedule":
            try:
                case.weft("adaptve")
            except weft.Error as error:
                message = str(error)
            same(Case(name, 2, sizes=(4,)))
            return message
    try:
        case.weft()
    except weft.Error as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = ""
    same(Case(name, 2, sizes=(4,)))  # a refused call leaves the group as it was
    return message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["integers", "inner", "tensor", "dtype", "out", "schedule"])
def test_bad_input_of_one_rank_is_one_sentence_on_all(ranks, name, change):
    for message in ranks(2).run(_refused, name, change):
        assert "\n" not in message
        if change != "out":
            assert message


def _refused_splits(name, kind):
    case, rank = Case(name, 2, sizes=(4,)), dist.get_rank()
    if kind == "sum" and rank == 0:
        case.in_splits = [3, 4]
    if kind == "disagree" and rank == 1:
        case.out_splits = [5, 3]
    if kind == "length" and rank == 1:
        case.in_splits = [8]
    if kind == "negative" and rank == 0:
        case.in_splits = [9, -1]
    if kind == "type" and rank == 1:
        case.out_splits = [4.0, 4.0]
    with pytest.raises(weft.Error) as error:
        case.weft()
    same(Case(name, 2, sizes=(4,)))
    return str(error.value)


@pytest.mark.parametrize("name", ["all_to_all_matmul", "matmul_all_to_all"])
@pytest.mark.parametrize("kind", ["sum", "disagree", "length", "negative", "type"])
def test_bad_splits(ranks, name, kind):
    messages = ranks(2).run(_refused_splits, name, kind)
    assert all("split" in message and "\n" not in message for message in messages)


@pytest.mark.parametrize("name", NAMES)
def test_no_process_group(name):
    x, w = torch.ones(2, 3), torch.ones(3, 2)
    splits = [[2], [2]] if "all_to_all" in name else []
    for tensor in (x, x.clone().requires_grad_()):
        with pytest.raises(weft.Unsupported, match="no process group"):
            getattr(weft, name)(tensor, w, *splits)
