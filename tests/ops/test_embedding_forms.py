"""Forms of `embedding_all_to_all`: modes, dtypes, offsets, lengths, tables by rows, optimizers."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

import weft
import weft.nn

HALF = (torch.bfloat16, torch.float16)
SCHEDULES = ("auto", "serial@dma", "hetero-unfused-1d@cores")


def draw(seed, batch, *, rows=(7, 20, 5), dims=(3, 8, 17), dtypes=(torch.float32,) * 3):
    """Tables of one rank with their bags: tables, indices, lengths, offsets."""
    random = torch.Generator().manual_seed(seed)
    tables, indices, lengths, offsets = [], [], [], []
    for count, dim, dtype in zip(rows, dims, dtypes, strict=True):
        length = torch.randint(0, 5, (batch,), generator=random)
        tables.append(torch.randint(-9, 9, (count, dim), generator=random).to(dtype))
        indices.append(torch.randint(0, count, (int(length.sum()),), generator=random))
        lengths.append(length)
        offsets.append(length.cumsum(0) - length)
    return tables, indices, lengths, offsets


def whole(seeds, batch, modes, **particular):
    """The result of all ranks by torch's own embedding_bag, in float64."""
    pooled = []
    for seed in seeds:
        tables, indices, _, offsets = draw(seed, batch, **particular)
        for table, index, offset, mode in zip(tables, indices, offsets, modes, strict=True):
            pooled.append(embedding_bag(index, table.double(), offset, mode=mode))
    return torch.cat(pooled, 1)


def own(tensor):
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


def modes_and_dtypes() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(3):
        for modes in (["max"] * 3, ["sum", "max", "mean"], ["mean", "sum", "max"]):
            seeds = [10 * seed + r for r in range(world)]
            want = own(whole(seeds, 9, modes))
            tables, indices, _, offsets = draw(seeds[rank], 9)
            mode = "max" if len(set(modes)) == 1 else modes
            for schedule in SCHEDULES:
                y = weft.embedding_all_to_all(
                    tables,
                    indices,
                    offsets,
                    mode=mode,
                    schedule=schedule,
                    include_last_offset=False,
                )
                assert y.dtype == torch.float32
                torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-6)
    for dtypes, result in (
        ((torch.float32, *HALF), torch.float32),
        (HALF + HALF[:1], torch.float32),
        (HALF[:1] * 3, torch.bfloat16 if world == 1 else torch.float32),
    ):
        # The last rank has half precision only, the others float32 too.
        alone = dtypes if rank == world - 1 else (torch.float32,) * 3
        seeds = list(range(world))
        want = own(whole(seeds, 6, ["sum"] * 3))
        tables, indices, _, offsets = draw(rank, 6, dtypes=alone)
        y = weft.embedding_all_to_all(tables, indices, offsets, include_last_offset=False)
        assert y.dtype == result
        assert torch.equal(y.double(), want), "whole numbers are exact in every dtype"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_modes_and_dtypes(ranks, world):
    ranks(world).run(modes_and_dtypes)


def gradients_of_modes() -> None:
    rank = dist.get_rank()
    modes, dtypes = ["max", "mean", "sum"], (torch.float32, torch.float32, torch.bfloat16)
    tables, indices, _, offsets = draw(rank, 8, dtypes=dtypes)
    ours = [table.clone().requires_grad_() for table in tables]
    y = weft.embedding_all_to_all(ours, indices, offsets, mode=modes, include_last_offset=False)
    scale = torch.arange(1.0, y.shape[1] + 1)
    (y * scale).sum().backward()
    column = sum(t.shape[1] for t in tables) * rank
    for table, mine, index, offset, mode in zip(tables, ours, indices, offsets, modes, strict=True):
        theirs = table.float().requires_grad_()
        pooled = embedding_bag(index, theirs, offset, mode=mode)
        (pooled * scale[column : column + table.shape[1]]).sum().backward()
        column += table.shape[1]
        tolerance = 1e-6 if table.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(mine.grad.float(), theirs.grad, rtol=tolerance, atol=tolerance)


def test_gradients_of_modes(ranks):
    ranks(2).run(gradients_of_modes)


class Jagged:
    """What torchrec calls a KeyedJaggedTensor, as far as it is used."""

    def __init__(self, values, lengths, weights=None) -> None:
        self._values, self._lengths, self._weights = values, lengths, weights

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def weights_or_none(self):
        return self._weights


def forms_of_bags() -> None:
    tables, indices, lengths, offsets = draw(dist.get_rank(), 6)
    weights = [torch.rand(len(index)) for index in indices]
    want = weft.embedding_all_to_all(tables, indices, offsets, include_last_offset=False)
    ends = [torch.cat([o, torch.tensor([len(i)])]) for o, i in zip(offsets, indices, strict=True)]
    values, flat = torch.cat(indices), torch.cat(lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given, options in (
            ((indices, ends), {"include_last_offset": True}),
            ((indices,), {"lengths": lengths}),
            ((values,), {"lengths": flat}),
            ((values.int(),), {"lengths": flat.view(3, 6).int()}),
            ((Jagged(values, flat),), {}),
        ):
            assert torch.equal(weft.embedding_all_to_all(tables, *given, **options), want)
        weighted = weft.embedding_all_to_all(
            tables, indices, offsets, per_sample_weights=weights, include_last_offset=False
        )
        jagged = Jagged(values, flat, torch.cat(weights))
        assert torch.equal(weft.embedding_all_to_all(tables, jagged), weighted)
    with pytest.warns(UserWarning, match="pass include_last_offset=True"):
        more = weft.embedding_all_to_all(tables, indices, ends)
    assert sum(weft.all_gather(torch.tensor([len(more)])).tolist()) == 7, (
        "an extra bag, as in torch"
    )


def test_forms_of_bags(ranks):
    ranks(2).run(forms_of_bags)


def refused() -> list[str]:
    rank, said = dist.get_rank(), []
    tables, indices, lengths, offsets = draw(1, 6)
    ends = [torch.cat([o, torch.tensor([len(i)])]) for o, i in zip(offsets, indices, strict=True)]
    flat = torch.cat(lengths)
    plain = {"include_last_offset": False}
    for given, options in (
        ((indices, [*offsets[:2], ends[2]]), plain),
        ((indices, ends if rank else offsets), plain),
        ((indices, offsets), {"include_last_offset": True}),
        ((torch.cat(indices), None), {"lengths": flat + 1}),
        ((torch.cat(indices), None), {"lengths": flat[:-1]}),
        ((indices, offsets), {"lengths": lengths}),
        ((indices,), {}),
        ((indices, offsets), {"mode": ["sum", "max"], **plain}),
        ((indices, offsets), {"row_splits": [[1, 2]] * 3, **plain}),
        ((indices, offsets), {"row_splits": [[7, 7], [20, 20]], **plain}),
    ):
        # One rank alone may be wrong: all are told.
        wrong = rank == 1 or options.get("include_last_offset") is False
        call = (*given,), options
        if not wrong:
            call = (indices, offsets), plain
        with pytest.raises(weft.Error) as error:
            weft.embedding_all_to_all(tables, *call[0], **call[1])
        said.append(str(error.value))
        weft.embedding_all_to_all(tables, indices, offsets, **plain)
    return said


def test_what_is_refused(ranks):
    for said in ranks(2).run(refused):
        for text, part in zip(
            said,
            (
                "pass include_last_offset=True",
                "it is 6 on rank 0 and 7 on rank 1; if offsets",
                "the last offset is the number of indices",
                "but lengths add up to",
                "cannot be those of 3 tables",
                "give offsets= or lengths=, not both",
                "give the bags as offsets= or as lengths=",
                "there are 3 tables, but 2 modes",
                "row_splits[0] says",
                "there are 3 tables, but 2 row_splits",
            ),
            strict=True,
        ):
            assert part in text, text


def tables_by_rows() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    tables, indices, _, offsets = draw(3, 7)  # every rank has all bags
    splits = [torch.arange(len(t)).tensor_split(world) for t in tables]
    row_splits = [[len(part) for part in parts] for parts in splits]
    row_splits[0] = [0] * (world - 1) + [7]  # the last rank has all rows
    starts = [sum(rows[:rank]) for rows in row_splits]
    for modes in (["sum"] * 3, ["mean", "max", "sum"], ["max"] * 3):
        ours = [
            t[first : first + rows[rank]].clone().requires_grad_()
            for t, first, rows in zip(tables, starts, row_splits, strict=True)
        ]
        y = weft.embedding_all_to_all(
            ours, indices, offsets, mode=modes, row_splits=row_splits, include_last_offset=False
        )
        theirs = [t.clone().requires_grad_() for t in tables]
        want = torch.cat(
            [
                embedding_bag(i, t, o, mode=m)
                for i, t, o, m in zip(indices, theirs, offsets, modes, strict=True)
            ],
            1,
        )
        torch.testing.assert_close(y, own(want))
        scale = torch.arange(1.0, want.shape[1] + 1)
        (want * scale).sum().backward()
        (y * scale).sum().backward()
        for number, (mine, table, first) in enumerate(zip(ours, theirs, starts, strict=True)):
            part = table.grad[first : first + len(mine)]
            if modes[number] == "max":  # rows with equal values may be told apart in another way
                part, got = part.sum(), weft.all_reduce(mine.grad.sum()[None])[0]
                torch.testing.assert_close(got, table.grad.sum())
            else:
                torch.testing.assert_close(mine.grad, part)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tables_by_rows(ranks, world):
    ranks(world).run(tables_by_rows)


class Counting:
    """Counts how often each row is updated in a step."""

    def __init__(self) -> None:
        self.rows = []

    def update(self, table, rows, gradient) -> None:
        assert gradient.dtype == torch.float32
        self.rows.append(rows)


def optimizers() -> None:
    tables, indices, _, offsets = draw(
        dist.get_rank(), 8, dtypes=(torch.float32, torch.float32, torch.bfloat16)
    )
    tables = [table / 8 for table in tables]
    options = {"mode": ["sum", "max", "mean"], "include_last_offset": False}
    plain = [table.clone().requires_grad_() for table in tables]
    ours, adagrad = copy.deepcopy(tables), copy.deepcopy(tables)
    sgd = weft.nn.SGDInBackward(lr=0.5)
    row_wise = weft.nn.RowWiseAdagradInBackward(lr=0.5)
    sums = [torch.zeros(len(table)) for table in tables]
    wanted = copy.deepcopy(tables)
    for _ in range(3):
        for some, optimizer in ((ours, sgd), (adagrad, row_wise)):
            y = weft.embedding_all_to_all(some, indices, offsets, optimizer=optimizer, **options)
            y.float().square().sum().backward()
            assert all(table.grad is None for table in some)
        y = weft.embedding_all_to_all(plain, indices, offsets, **options)
        y.float().square().sum().backward()
        with torch.no_grad():
            for table in plain:
                table.copy_((table.float() - 0.5 * table.grad.float()).to(table.dtype))
                table.grad = None
        leaves = [table.clone().requires_grad_() for table in wanted]
        y = weft.embedding_all_to_all(leaves, indices, offsets, **options)
        y.float().square().sum().backward()
        for table, leaf, total in zip(wanted, leaves, sums, strict=True):
            gradient = leaf.grad.float()
            total += gradient.square().mean(1)
            step = 0.5 * gradient / (total.sqrt() + 1e-8)[:, None]
            table.copy_((table.float() - step).to(table.dtype))
    for some, others in ((ours, plain), (adagrad, wanted)):
        for mine, other in zip(some, others, strict=True):
            tolerance = 1e-5 if mine.dtype == torch.float32 else 3e-2
            torch.testing.assert_close(mine, other.detach(), rtol=tolerance, atol=tolerance)
    counting = Counting()
    weights = [
        torch.ones(len(i), dtype=t.dtype).requires_grad_()
        for i, t in zip(indices, tables, strict=True)
    ]
    y = weft.embedding_all_to_all(
        tables,
        indices,
        offsets,
        per_sample_weights=weights,
        optimizer=counting,
        include_last_offset=False,
    )
    y.sum().backward()
    for rows, index in zip(counting.rows, indices, strict=True):
        assert torch.equal(rows, index.unique()), "each row once"
    assert all(weight.grad is not None for weight in weights)


def test_optimizers_in_the_backward_pass(ranks):
    ranks(2).run(optimizers)
