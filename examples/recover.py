"""Training that goes on after a rank has died, from a checkpoint. In process: the survivors catch
`weft.PeerLost`, form a smaller group, share out the weights anew, and go on.

    python examples/recover.py

Or all ranks start again, as torchrun does it:

    torchrun --nproc-per-node 2 --max-restarts 1 examples/recover.py

In both, rank 1 kills itself at step `--fail-at`. The losses are compared with those of the same
training in plain torch, in which nothing fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

import weft

Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """Two layers. A rank has its columns of the first weight and the same rows of the second."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, rank: int = 0, world: int = 1) -> None:
        self.up = up.tensor_split(world, 1)[rank].clone().requires_grad_()
        self.down = down.tensor_split(world)[rank].clone().requires_grad_()

    def step(self, x: torch.Tensor, y: torch.Tensor, reduce: Reduce) -> float:
        """One step of gradient descent; gives the loss before it."""
        loss = (reduce(torch.relu(x @ self.up), self.down) - y).square().mean()
        loss.backward()
        with torch.no_grad():
            for weight in (self.up, self.down):
                weight -= 0.05 * weight.grad
                weight.grad = None
        return loss.item()

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of all ranks."""
        up, down = self.up.detach().t().contiguous(), self.down.detach()
        sizes = [int(size) for size in weft.all_gather(torch.tensor([len(down)]))]
        return weft.all_gather(up, sizes=sizes).t(), weft.all_gather(down, sizes=sizes)


def data(arguments: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """Inputs, targets and the first weights, the same on every rank."""
    size, hidden = arguments.size, 3 * arguments.size
    torch.manual_seed(0)
    x, y = torch.randn(32, size), torch.randn(32, size)
    return x, y, torch.randn(size, hidden) / size**0.5, torch.randn(hidden, size) / hidden**0.5


def train(arguments: argparse.Namespace, fails: bool) -> list[float]:
    """Trains on the group of this rank, from the last checkpoint on; gives the losses of all steps
    since the first. fails: whether rank 1 dies on the way."""
    x, y, up, down = data(arguments)
    rank, world = dist.get_rank(), dist.get_world_size()
    file, first, losses = Path(arguments.checkpoint), 0, []
    killed = Path(f"{arguments.checkpoint}.killed")  # when, for the time that recovery takes
    if file.exists():
        kept = torch.load(file)
        first, losses, up, down = kept["step"], kept["losses"], kept["up"], kept["down"]
    model = Model(up, down, rank, world)
    for step in range(first, arguments.steps):
        if fails and step == arguments.fail_at and rank == 1:
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(model.step(x, y, weft.matmul_all_reduce))
        if rank == 0 and step == first and not fails:
            since = time.time() - float(killed.read_text())
            print(
                f"{world} ranks go on from step {first}; the first good call was "
                f"{since:.2f} s after the kill"
            )
        if (step + 1) % arguments.every == 0:
            up, down = model.whole()
            if rank == 0:  # first beside it, so that a checkpoint is whole or not there
                kept = {"step": step + 1, "losses": losses, "up": up, "down": down}
                torch.save(kept, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
    return losses


def survive(arguments: argparse.Namespace, rank: int) -> None:
    """A rank that goes on with those that are left."""
    members = list(range(arguments.world))
    file = dist.FileStore(f"{arguments.checkpoint}.store", -1)
    while True:
        # Every attempt has keys of its own; the store must not be on a rank that may die.
        store = dist.PrefixStore(f"{len(members)} ranks", file)
        here, world = members.index(rank), len(members)
        dist.init_process_group("gloo", store=store, rank=here, world_size=world)
        try:
            losses = train(arguments, fails=world == arguments.world)
            break
        except weft.PeerLost as lost:
            print(f"rank {rank}: {lost}")
            del members[lost.rank]
            dist.destroy_process_group()
    if members.index(rank) == 0:
        compare(arguments, losses)
    dist.destroy_process_group()


def compare(arguments: argparse.Namespace, losses: list[float]) -> None:
    x, y, up, down = data(arguments)
    plain = Model(up, down)
    expected = [plain.step(x, y, torch.mm) for _ in range(arguments.steps)]
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; largest difference of a loss from a")
    print(f"training in which nothing failed: {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=3, help="ranks, without torchrun")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints")
    parser.add_argument("--fail-at", type=int, default=10)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--checkpoint", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # One name for all ranks and all attempts: they have the same parent, torchrun.
        named = f"{tempfile.gettempdir()}/recover-{os.getppid()}"
        arguments.checkpoint = arguments.checkpoint or named
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        # torchrun keeps its store for all attempts, and gloo would find the addresses of ranks that
        # have ended. So every attempt has keys of its own.
        store, rank, world = next(rendezvous("env://"))
        store = dist.PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        losses = train(arguments, fails=attempt == "0")
        if dist.get_rank() == 0:
            compare(arguments, losses)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.checkpoint = arguments.checkpoint or f"{folder}/checkpoint"
        context = multiprocessing.get_context("fork")  # torch is imported, and has no thread yet
        ranks = [
            context.Process(target=survive, args=(arguments, rank))
            for rank in range(arguments.world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
