"""Layouts say where elements are: what they call equal is equal, tried on real tensors."""

from __future__ import annotations

import random

import torch

from weft.nn.layout import DimensionPart, Layout


def test_a_gather_along_the_second_dimension():
    layout = Layout.of([("ranks", 2), ("a", 3)], [("b", 4)], [("k", 5)])
    moved = layout.rechunked(0, 2, 1)
    assert moved == Layout.of([("a", 3)], [("ranks", 2), ("b", 4)], [("k", 5)])
    assert moved.regrouped([24, 5]) == Layout.of([("a", 3), ("ranks", 2), ("b", 4)], [("k", 5)])


def test_cut_and_joined_again():
    layout = Layout.of([("m", 12)], [("n", 5)])
    cut = layout.regrouped([3, 4, 5])
    assert cut.dims[0] == (DimensionPart("m", 3, (0, 4)),)
    assert cut.regrouped([12, 5]) == layout
    assert cut.regrouped([3, 2, 2, 5]).regrouped([12, 5]) == layout
    assert cut.permuted([1, 0, 2]).regrouped([12, 5]) != layout


def test_what_does_not_fit():
    layout = Layout.of([("m", 6)], [("n", 5)])
    assert layout.regrouped([4, 5]) is None
    assert layout.regrouped([5, 6]) is None
    assert layout.rechunked(0, 4, 1) is None


def test_layouts_that_are_equal_belong_to_equal_tensors():
    """Random chains of moves on a tensor of numbers: layouts never call different tensors equal,
    and know a tensor that is back where it was."""
    choose = random.Random(7)
    same = 0
    for _ in range(300):
        start = Layout.of([("r", 2), ("a", 3)], [("b", 4)], [("k", 6)])
        tensor = torch.arange(2 * 3 * 4 * 6).view(6, 4, 6)
        layout, seen = start, [(start, tensor)]
        for _ in range(6):
            step = choose.choice(["permute", "view", "chunk"])
            if step == "permute":
                order = choose.sample(range(tensor.dim()), tensor.dim())
                moved, after = layout.permuted(order), tensor.permute(order)
            elif step == "view":
                shape = choose.choice(
                    [(6, 4, 6), (24, 6), (144,), (2, 3, 4, 6), (6, 24), (3, 8, 6)]
                )
                moved, after = layout.regrouped(shape), tensor.reshape(shape)
            else:
                source, target = (choose.randrange(tensor.dim()) for _ in range(2))
                if tensor.shape[source] % 2:
                    continue
                moved = layout.rechunked(source, 2, target)
                after = torch.cat(tensor.chunk(2, source), target)
            if moved is None:
                continue
            layout, tensor = moved, after
            assert [layout.size(i) for i in range(tensor.dim())] == list(tensor.shape)
            for other, value in seen:
                if other == layout:
                    assert torch.equal(value, tensor)
                    same += 1
            seen.append((layout, tensor))
    assert same > 100
