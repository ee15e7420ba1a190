"""That operators equal plain torch: what tests have ranks do. `operators.py` has the table."""

from __future__ import annotations

import os
import random
import time

import torch
import torch.distributed as dist
from operator_entry import Draw, Peers, mapped
from operators import OPERATORS

import weft
from weft.run.session import of as session_of

DEVICE = os.environ.get("WEFT_TEST_DEVICE", "")
"""Where tensors are, if not in host memory."""


def _to_device(tensor):
    return tensor.to(DEVICE)


class Case:
    """One call of one operator with this rank's tensors: `weft()` and `plain()` are to be equal.

    particular: for the example, beyond what is drawn for all operators."""

    def __init__(self, name, seed, dtype=torch.float32, *, example="plain", group=None,
                 particular=None, **drawn):  # fmt: skip
        self.operator, self.group = OPERATORS[name], group
        draw = Draw(seed, dtype, group=group, **drawn)
        self.example = self.operator.examples[example](draw, **(particular or {}))
        self.dtype, self.peers = dtype, Peers(group)

    def weft(self, schedule="auto", **options):
        """The result of the operator, on the device of the fabric that is tested."""
        options.update(group=self.group, schedule=schedule)
        if not DEVICE:
            return self.example.call(self.operator.function, **options)
        with torch.device(DEVICE):  # which also tells a rank that has no tensor
            result = self.example.map(_to_device).call(self.operator.function, **options)
        return result if "out" in options else mapped(result, torch.Tensor.cpu)

    def plain(self):
        """In float64, by torch.distributed and torch alone."""
        return self.example.double().call(self.operator.reference, peers=self.peers)


def tensors(result) -> list[torch.Tensor]:
    """The tensors of a result, which may be one, several, or several and the gathered x."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors(part)]


def equal(case: Case, got, want, *about) -> None:
    """That a result is what plain torch gave."""
    assert len(tensors(got)) == len(tensors(want))
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        if case.example.tensors or ours.shape[-1]:  # else there is no tensor to take a dtype from
            assert ours.dtype == case.dtype
        ours, theirs = ours.detach(), theirs.detach().to(ours.dtype)
        assert torch.equal(ours, theirs), (case.operator.name, *about, ours, theirs)


def same(case: Case, schedule="auto", **options) -> None:
    """That weft and plain torch give the same."""
    equal(case, case.weft(schedule, **options), case.plain(), schedule)


def expect_new_sizes(group=None) -> None:
    """Forgets known calls on a device. They are enqueued at once and expect that no rank has other
    sizes than the last time, but tests draw sizes that are new to some ranks only."""
    if DEVICE:
        session_of(weft.fabric.of(group, DEVICE)).runners.clear()


def forward(name, schedules, seeds, dtypes=(torch.float32,), example="plain", **drawn) -> None:
    """Every schedule on random sizes of every seed; inputs stay as they were."""
    for seed in seeds:
        expect_new_sizes()
        for dtype in dtypes:
            first = Case(name, seed, dtype, example=example, **drawn)
            want = first.plain()
            for schedule in schedules:
                case = Case(name, seed, dtype, example=example, **drawn)
                equal(case, case.weft(schedule), want, example, seed, schedule)
                assert all(map(torch.equal, case.example.tensors, first.example.tensors))


def shapes(name, schedules, dtype) -> None:
    """Every schedule on the shapes that an operator names."""
    operator = OPERATORS[name]
    some = operator.shapes if dtype in (torch.float32, torch.bfloat16) else operator.shapes[-2:]
    for seed, shape in enumerate(some):
        forward(name, schedules, [seed], [dtype], shape=shape)


def backward(name, schedules, seeds, dtypes=(torch.float32,), example="plain", **drawn) -> None:
    """The gradients of every tensor that can have one, beside those of the plain way."""
    for seed in seeds:
        expect_new_sizes()
        for dtype in dtypes:
            want = _gradients(name, seed, dtype, example, None, drawn)
            for schedule in schedules:
                got = _gradients(name, seed, dtype, example, schedule, drawn)
                for ours, theirs in zip(got, want, strict=True):
                    assert (ours is None) == (theirs is None)
                    if ours is not None:
                        about = (name, example, seed, schedule, ours, theirs)
                        assert torch.equal(ours.double(), theirs), about


def _gradients(name, seed, dtype, example, schedule, drawn):
    """Those of a sum with random weights over all results; schedule None: the plain way."""
    case = Case(name, seed, dtype, example=example, grad=True, **drawn)
    if schedule is None:
        inputs = case.example.double()
        result = inputs.call(case.operator.reference, peers=case.peers)
    else:
        inputs, result = case.example, case.weft(schedule)
    # One result that all ranks hold has one gradient.
    own = torch.Generator().manual_seed(7 if case.operator.replicated else 7 + case.peers.rank)
    averaged = case.example.options.get("reduce_op") == "avg"
    unit = case.peers.world if averaged else 1  # so that what is divided stays whole
    total = 0
    for y in tensors(result):
        factor = unit * torch.randint(-1, 2, y.shape, generator=own).to(y.dtype)
        total = total + (y * factor).sum()
    total.backward()
    return [leaf.grad for leaf in inputs.leaves]


class _Shared(torch.autograd.Function):
    """Values that all ranks hold, and each uses in part: gradients are summed over ranks."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def gradcheck(name, schedule, seed) -> None:
    """torch's gradcheck of an operator as one function of the inputs of all ranks to the results of
    all: every rank holds all inputs and moves the same one at the same time."""
    case = Case(name, seed, torch.float64, sizes=(1, 2, 3))
    shapes = [None] * case.peers.world
    dist.all_gather_object(shapes, [tuple(tensor.shape) for tensor in case.example.tensors])
    sizes = [torch.Size(shape).numel() for own in shapes for shape in own]
    first = sum(len(own) for own in shapes[: case.peers.rank])
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(sizes), dtype=torch.float64, generator=generator)
    given = case.example

    def function(values):
        own = iter(_Shared.apply(values).split(sizes)[first:])
        case.example = given.map(lambda tensor: next(own).view(tensor.shape))
        y = case.weft(schedule)
        # One result that all ranks hold; otherwise every rank looks at the results of all.
        if case.operator.replicated:
            return y.clone()
        return torch.cat([other.flatten() for other in case.peers.gather(y, sums=False)])

    assert torch.autograd.gradcheck(
        function, (values.requires_grad_(),), check_undefined_grad=False
    )


def on_link(link, name, schedules) -> None:
    """Sizes of many chunks on a paced link."""
    weft.configure(link=link)
    try:
        for schedule in schedules:
            same(Case(name, 11, sizes=(200, 300)), schedule)
    finally:
        weft.configure(link="memory")


def delayed_runs(name, schedule) -> None:
    """Two runs are equal to the last bit, whoever is late."""
    rank, delays = dist.get_rank(), random.Random(dist.get_rank())
    own = torch.Generator().manual_seed(rank)
    case = Case(name, 4, sizes=(97, 130))
    case.example = case.example.map(lambda tensor: torch.randn(tensor.shape, generator=own))
    first = case.weft(schedule)
    for _ in range(6):
        time.sleep(delays.choice((0.0, 0.0, 0.002, 0.01)))
        assert torch.equal(case.weft(schedule), first)


def sequence(seed, count, few) -> None:
    """Random calls of all operators on two overlapping groups of four ranks, with delays of a
    rank's own. few: the schedules of every operator."""
    rank, members = dist.get_rank(), ((0, 1, 2), (1, 2, 3))
    groups = [dist.new_group(list(ranks)) for ranks in members]
    common, own = random.Random(seed), random.Random(100 * seed + rank)
    for number in range(count):
        which, name = common.choice((0, 1)), common.choice(list(OPERATORS))
        schedule, dtype = common.choice(few[name]), common.choice(OPERATORS[name].dtypes)
        grad, case_seed = common.random() < 0.3, common.choice((1, 2, 3, 40 + number))
        if rank not in members[which]:
            continue
        if own.random() < 0.1:
            time.sleep(own.choice((0.001, 0.01)))
        case = Case(name, case_seed, dtype, group=groups[which], grad=grad)
        got = case.weft(schedule)
        equal(case, got, case.plain(), number, schedule)
        if grad:
            got.sum().backward()
    dist.barrier()
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


def given_outputs(name, schedules) -> None:
    """`out=`: in ordinary and in symmetric memory, by columns, and as a part of something wider."""
    for schedule in schedules:
        for dtype in OPERATORS[name].dtypes[:1] + OPERATORS[name].dtypes[-2:-1]:
            case = Case(name, 5, dtype, shape=(11, 5, 6), sizes=(3, 5, 8))
            want = case.plain()
            rows, columns = want.shape
            own = {"dtype": dtype, "device": DEVICE or "cpu"}
            wide = torch.zeros(rows, columns + 4, **own)
            outs = [torch.full(want.shape, torch.nan, **own), wide[:, 2 : columns + 2]]
            outs.append(torch.full((columns, rows), torch.nan, **own).t())
            if not DEVICE:
                outs.append(weft.symmetric_empty(rows, columns, dtype=dtype))
            for out in outs:
                assert case.weft(schedule, out=out) is out
                assert torch.equal(out.cpu().double(), want), (name, schedule)
            assert not wide[:, :2].any()
            assert not wide[:, columns + 2 :].any()


def opcheck(name, example) -> None:
    case = Case(name, 6, example=example, grad=True, sizes=(4, 6))
    arguments, options = case.operator.graph(case.example, dist.group.WORLD.group_name)
    function = getattr(torch.ops.weft, name).default
    torch.library.opcheck(function, arguments, options)


def refused(name, change) -> str:
    """Input of rank 0 that is wrong: what it says. A refused call leaves the group as it was."""
    case = Case(name, 2, sizes=(4,))
    message, options = "", {}
    if dist.get_rank() == 0:
        x, w, *rest = case.example.arguments
        if change == "integers":
            x, w = x.int(), w.int()
        elif change == "inner":
            w = torch.ones(7, 4)
        elif change == "tensor":
            w = None
        elif change == "dtype":
            w = w.double()
        elif change == "out":
            options["out"] = torch.empty(3, 3)
        elif change == "schedule":
            options["schedule"] = "adaptve"
        case.example = type(case.example)((x, w, *rest), case.example.options)
    try:
        case.weft(**options)
    except weft.Error as error:
        message = f"{type(error).__name__}: {error}"
    same(Case(name, 2, sizes=(4,)))
    return message


def refused_splits(name, kind) -> str:
    case, rank = Case(name, 2, sizes=(4,)), dist.get_rank()
    x, w, sent, taken = case.example.arguments
    if kind == "sum" and rank == 0:
        sent = [3, 4]
    if kind == "disagree" and rank == 1:
        taken = [5, 3]
    if kind == "length" and rank == 1:
        sent = [8]
    if kind == "negative" and rank == 0:
        sent = [9, -1]
    if kind == "type" and rank == 1:
        taken = [4.0, 4.0]
    case.example = type(case.example)((x, w, sent, taken))
    try:
        case.weft()
    except weft.Error as error:
        message = str(error)
    else:
        raise AssertionError("these splits were not refused")
    same(Case(name, 2, sizes=(4,)))
    return message


def there_and_back() -> None:
    """Rows that are sent and come back, with in_splits that are their own transpose."""
    splits, own = [[1, 3], [3, 1]][dist.get_rank()], Draw(1, torch.float64, grad=True)
    x = own.values(4, 2, 3)
    w = torch.arange(15.0, dtype=torch.float64).view(3, 5).requires_grad_()
    y, received = weft.all_to_all_matmul(x, w, splits, splits, return_gathered=True)
    assert (y.shape, received.shape) == ((4, 2, 5), (4, 2, 3))
    back = weft.matmul_all_to_all(received, w, splits, splits)
    assert torch.equal(back, x @ w)
    (back.sum() + y.sum()).backward()
    assert torch.equal(x.grad, 2 * torch.ones(4, 2, 5).double() @ w.detach().t())
