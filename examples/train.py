"""Training with FSDP2 and tensor parallelism on four ranks, with checkpoints that resume bit-equal.

    torchrun --nproc-per-node 4 examples/train.py [--steps 8] [--checkpoint DIR] [--asynchronous]

The mesh is 2 x 2: fully_shard over the first dimension, weft's parallel styles over the second.
After half of the steps the model and its optimizer are saved with torch.distributed.checkpoint, in
the background with --asynchronous, while training goes on. Then a new model loads the checkpoint
and trains the second half again: its losses and weights equal those of the first run, bit by bit.
If DIR has a checkpoint already, training resumes from it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft.nn
from weft.models.small_llama import Llama, LlamaShape, parallelize


class Trainer:
    """A sharded Llama and its optimizer."""

    def __init__(self, mesh: DeviceMesh, arguments: argparse.Namespace) -> None:
        shape = LlamaShape(
            size=arguments.size, hidden=3 * arguments.size, num_layers=arguments.layers
        )
        self.mesh, self.arguments, self.vocabulary = mesh, arguments, shape.vocabulary
        self.model = parallelize(Llama(shape), mesh["tensor"], "weft")
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(self.model, mesh=mesh["data"])
        weft.nn.gather_by_weft(self.model, mesh["data"].get_group())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batch(self, step: int) -> torch.Tensor:
        """The tokens of a step: other ones for every data-parallel rank, always the same."""
        seed = 1000 * step + self.mesh["data"].get_local_rank()
        random = torch.Generator().manual_seed(seed)
        size = (2, self.arguments.sequence)
        return torch.randint(self.vocabulary, size, generator=random)

    def run(self, first: int, last: int) -> list[float]:
        """Trains the steps from `first` to before `last`; returns their losses on this rank."""
        losses = []
        for step in range(first, last):
            loss = self.model.loss(self.batch(step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int, directory: Path) -> object | None:
        """Writes a checkpoint; in the background, a future of it is returned."""
        state = {**self.state(), "step": step}
        if self.arguments.asynchronous:
            return checkpoint.async_save(state, checkpoint_id=directory)
        checkpoint.save(state, checkpoint_id=directory)
        return None

    def load(self, directory: Path) -> int:
        """Loads a checkpoint; returns the step at which it was written."""
        state = {**self.state(), "step": 0}
        checkpoint.load(state, checkpoint_id=directory)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(state["step"])


def same(one: Trainer, other: Trainer) -> bool:
    """Whether this rank's shards of all weights are equal bit by bit."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--checkpoint", type=Path, help="a directory; by default a temporary one")
    parser.add_argument("--asynchronous", action="store_true", help="save in the background")
    parser.add_argument("--backend", default="gloo", help="gloo or weft")
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    torch.set_num_threads(1)
    if dist.get_world_size() != 4:
        raise SystemExit("this example needs four ranks: torchrun --nproc-per-node 4")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place = [str(arguments.checkpoint or tempfile.mkdtemp(prefix="weft-train-"))]
    dist.broadcast_object_list(place)
    directory, half, rank = Path(place[0]) / "step", arguments.steps // 2, dist.get_rank()

    trainer, first = Trainer(mesh, arguments), 0
    if (directory / ".metadata").exists():
        first = trainer.load(directory)
        if rank == 0:
            print(f"resumed from step {first}")
        losses = trainer.run(first, first + arguments.steps)
        if rank == 0:
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        dist.destroy_process_group()
        return
    before = trainer.run(0, half)
    saving = trainer.save(half, directory)
    after = trainer.run(half, arguments.steps)
    if saving is not None:
        saving.result()
    dist.barrier()

    resumed = Trainer(mesh, arguments)
    again = resumed.run(resumed.load(directory), arguments.steps)
    equal = torch.tensor(float(again == after and same(trainer, resumed)))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    if rank == 0:
        print(f"loss {before[0]:.4f} -> {after[-1]:.4f} on mesh {tuple(mesh.shape)}")
        how = "in the background" if arguments.asynchronous else "at once"
        print(f"a checkpoint was written {how} after step {half}")
        verdict = "equals" if equal.item() else "DIFFERS FROM"
        print(f"the resumed run {verdict} the first one bit by bit")
    dist.destroy_process_group()
    if not equal.item():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
