"""A mixture of experts, one expert per rank, with uneven routing: tokens go to their expert inside
its first product (all_to_all_matmul) and come back inside its second (matmul_all_to_all).

    torchrun --nproc-per-node 2 examples/moe.py

The result and all gradients are checked against every expert computed in one place.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

import weft


def route(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The order that puts tokens of one expert together, every token's gate, tokens per expert."""
    gate, expert = (x @ router).softmax(-1).max(-1)
    order = expert.argsort(stable=True)
    return order, gate, expert.bincount(minlength=router.shape[1]).tolist()


def exchange_counts(sent: list[int]) -> list[int]:
    """How many tokens come from each rank."""
    everywhere = [torch.empty(len(sent), dtype=torch.int64) for _ in sent]
    dist.all_gather(everywhere, torch.tensor(sent))
    return [int(counts[dist.get_rank()]) for counts in everywhere]


def layer(
    x: torch.Tensor, router: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """The layer with this rank's expert (w1, w2); x is this rank's tokens."""
    order, gate, sent = route(x, router)
    received = exchange_counts(sent)
    hidden = gelu(weft.all_to_all_matmul(x[order], w1, sent, received))
    y = weft.matmul_all_to_all(hidden, w2, received, sent)
    return torch.empty_like(y).index_copy(0, order, y) * gate[:, None]


def reference(
    x: torch.Tensor, router: torch.Tensor, w1s: list[torch.Tensor], w2s: list[torch.Tensor]
) -> torch.Tensor:
    """The same with all experts at hand."""
    gate, expert = (x @ router).softmax(-1).max(-1)
    results = torch.stack([gelu(x @ w1) @ w2 for w1, w2 in zip(w1s, w2s, strict=True)])
    return results[expert, torch.arange(x.shape[0])] * gate[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--link", default="memory", help="memory, or a rate such as 0.05GB/s")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    weft.configure(link=arguments.link)
    rank, world, size = dist.get_rank(), dist.get_world_size(), arguments.size
    shared = torch.Generator().manual_seed(1)
    router = torch.randn(size, world, generator=shared) / size**0.5
    router[:, 0] += 0.02  # most tokens want the first expert
    w1s = [torch.randn(size, 4 * size, generator=shared) / size**0.5 for _ in range(world)]
    w2s = [torch.randn(4 * size, size, generator=shared) / size for _ in range(world)]
    own = torch.Generator().manual_seed(rank + 10)
    x = torch.randn(arguments.tokens, size, generator=own) + 0.5

    ours = [t.clone().requires_grad_() for t in (x, w1s[rank], w2s[rank])]
    y = layer(ours[0], router, ours[1], ours[2])
    y.square().sum().backward()

    theirs = [t.clone().requires_grad_() for t in (x, *w1s, *w2s)]
    want = reference(theirs[0], router, theirs[1 : world + 1], theirs[world + 1 :])
    want.square().sum().backward()
    for gradient in (t.grad for t in theirs[1:]):
        dist.all_reduce(gradient)  # an expert learns from the tokens of all ranks

    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    for got, expected in zip(
        ours, (theirs[0], theirs[1 + rank], theirs[1 + world + rank]), strict=True
    ):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-3, atol=1e-4)
    _, _, sent = route(x, router)
    counts: list = [None] * world
    dist.all_gather_object(counts, sent)
    if rank == 0:
        print("tokens that each rank sends to each expert:", counts)
        print("results and gradients equal those of all experts in one place")
        print(weft.explain())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
