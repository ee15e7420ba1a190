"""A recommendation model (DLRM): embedding tables are spread over the ranks, the layers below and
above them are data-parallel. Pooled rows go from the rank of their table to the rank of their
sample inside the lookups (embedding_all_to_all).

    torchrun --nproc-per-node 2 examples/dlrm.py

The same steps are trained with `embedding_bag`, all-to-all and cat; both ways must have the same
losses, and print their speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

import weft

Lookup = Callable[..., torch.Tensor]


def fused(tables: list, indices: list, offsets: list) -> torch.Tensor:
    return weft.embedding_all_to_all(tables, indices, offsets)


def plain(tables: list, indices: list, offsets: list) -> torch.Tensor:
    """In steps: look up, pack, exchange, unpack. Every rank must have as many columns."""
    inputs = zip(indices, tables, offsets, strict=True)
    packed = torch.cat([embedding_bag(i, t, o, mode="sum") for i, t, o in inputs], 1)
    received = all_to_all_single(torch.empty_like(packed), packed)
    parts = received.view(dist.get_world_size(), -1, packed.shape[1])
    return torch.cat(list(parts), 1)


class Model(nn.Module):
    """This rank's tables, and its copy of the layers."""

    def __init__(self, num_tables: int, rows: int, dim: int, lookup: Lookup) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.lookup = lookup
        torch.manual_seed(rank + 1)
        mine = num_tables // world
        self.tables = nn.ParameterList(torch.randn(rows, dim) / dim**0.5 for _ in range(mine))
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        pairs = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, indices: list, offsets: list) -> torch.Tensor:
        below = self.bottom(dense)
        pooled = self.lookup(list(self.tables), indices, offsets)
        features = torch.cat([below, pooled], 1).view(dense.shape[0], -1, below.shape[1])
        dots = features @ features.transpose(1, 2)
        above, right = torch.triu_indices(dots.shape[1], dots.shape[1], 1)
        return self.top(torch.cat([below, dots[:, above, right]], 1))[:, 0]


def train(lookup: Lookup, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """The losses of some steps, and samples per second."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model(arguments.tables, arguments.rows, arguments.dim, lookup)
    layers = [*model.bottom.parameters(), *model.top.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank + 100)
    batch, own = arguments.batch, arguments.batch // world
    losses, spent = [], 0.0
    for step in range(arguments.steps):
        dense = torch.randn(own, 13, generator=data)
        clicked = (torch.rand(own, generator=data) < 0.3).float()
        asked = (batch * arguments.pooling,)
        indices = [torch.randint(arguments.rows, asked, generator=data) for _ in model.tables]
        offsets = [torch.arange(0, asked[0], arguments.pooling) for _ in model.tables]
        dist.barrier()
        start = time.perf_counter()
        loss = binary_cross_entropy_with_logits(model(dense, indices, offsets), clicked)
        optimizer.zero_grad()
        (loss / world).backward()
        for parameter in layers:  # data-parallel: gradients of the layers are summed
            dist.all_reduce(parameter.grad)
        optimizer.step()
        spent += time.perf_counter() - start if step else 0.0
        losses.append(loss.item())
    return losses, batch * (arguments.steps - 1) / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--pooling", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {name: train(way, arguments) for name, way in (("plain", plain), ("fused", fused))}
    for a, b in zip(found["plain"][0], found["fused"][0], strict=True):
        assert abs(a - b) < 1e-4, f"different losses: {found}"
    if dist.get_rank() == 0:
        for name, (losses, speed) in found.items():
            print(f"{name}  {speed:.0f} samples/s, losses {losses[0]:.4f} ... {losses[-1]:.4f}")
        print("both ways have the same losses")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
