"""FSDP2 with its weights gathered by gloo and by weft: the same losses.

    torchrun --nproc-per-node 2 examples/fsdp2.py [--steps 20] [--size 256] [--layers 4]

The model, the optimizer and the process group are plain torch; one line lets weft gather weights:
`weft.nn.gather_by_weft(model)`.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft


def train(arguments: argparse.Namespace, gather: str) -> tuple[list[float], float]:
    """The losses of a small sharded network, and the seconds of a step."""
    torch.manual_seed(0)
    size = arguments.size
    layers = [
        torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU())
        for _ in range(arguments.layers)
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(size, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if gather == "weft":
        weft.nn.gather_by_weft(model, mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(dist.get_rank())
    losses, started = [], time.perf_counter()
    for step in range(arguments.steps):
        if step == 1:
            started = time.perf_counter()  # the first step makes buffers
        x = torch.randn(32, size, generator=random)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(weft.all_reduce(loss.detach(), "avg")))
    return losses, (time.perf_counter() - started) / max(1, arguments.steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {gather: train(arguments, gather) for gather in ("gloo", "weft")}
    if dist.get_rank() == 0:
        for gather, (losses, seconds) in results.items():
            print(
                f"{gather}  loss {losses[0]:.4f} -> {losses[-1]:.4f}  {seconds * 1e3:.2f} ms a step"
            )
        pairs = zip(results["gloo"][0], results["weft"][0], strict=True)
        print(f"largest difference of a loss: {max(abs(a - b) for a, b in pairs):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
