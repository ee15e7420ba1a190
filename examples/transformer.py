"""Trains a small Llama-style transformer with tensor and sequence parallelism, twice: with torch's
parallel styles and with weft's, on the same link. The losses are the same; the time is not.

    torchrun --nproc-per-node 2 examples/transformer.py

`--link 0.05GB/s` paces the link between the ranks (default: memory speed). Torch's own collectives
run over the same link, by `plain_collectives`; see docs/how-to/parallel-styles.md.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.measure.emulate import plain_collectives
from weft.models.small_llama import Llama, LlamaShape, parallelize


def train(
    kind: str, shape: LlamaShape, steps: int, batch: int, sequence: int
) -> tuple[list, float]:
    """The loss of every step, and the seconds of all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize(Llama(shape), mesh, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text = torch.Generator().manual_seed(1)
    losses = []
    start = time.perf_counter()
    for _ in range(steps):
        # Text with something to learn: the tokens of a sequence count up by a fixed step.
        first = torch.randint(shape.vocabulary, (batch, 1), generator=text)
        tokens = (first + 3 * torch.arange(sequence)) % shape.vocabulary
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--link", default="memory", help="memory, or a rate such as 0.05GB/s")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    weft.configure(link=arguments.link)
    shape = LlamaShape(size=arguments.size, hidden=3 * arguments.size)
    results = {}
    with plain_collectives():
        for kind in ("torch", "weft"):
            results[kind] = train(kind, shape, arguments.steps, arguments.batch, arguments.sequence)
    apart = max(abs(a - b) for a, b in zip(results["torch"][0], results["weft"][0], strict=True))
    if dist.get_rank() == 0:
        for kind, (losses, seconds) in results.items():
            print(
                f"{kind:5}  loss {losses[0]:.6f} -> {losses[-1]:.6f}"
                f"  {seconds / arguments.steps * 1e3:.1f} ms a step"
            )
        print(f"largest difference of a loss: {apart:.1e}")
    assert apart <= 1e-5, "the two trainings differ"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
