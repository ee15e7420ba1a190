"""The ranks of examples/serve.py: a tensor-parallel Llama that runs steps for many sequences at
once, the processes that hold it, and a comparison with torch's parallel styles on gloo.

A step has rows of several sequences: all rows of a prompt (prefill), or one row of each sequence
(decode). Linear layers multiply all rows together; attention looks at each sequence's own cache.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel as torch_styles
from torch.nn.functional import scaled_dot_product_attention, silu

import weft
import weft.nn


@dataclass(frozen=True)
class Sizes:
    size: int = 256
    hidden: int = 768
    heads: int = 8
    layers: int = 4
    vocabulary: int = 512


@dataclass
class Cache:
    """The keys and values of one sequence, by layer."""

    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    length: int = 0

    def add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for kept, new in ((self.keys, key), (self.values, value)):
            kept[layer] = torch.cat([kept[layer], new], 1) if layer in kept else new


Span = tuple[Cache, int, int]
"""A sequence in a step: its cache, its first row, and its rows."""


class Block(nn.Module):
    def __init__(self, number: int, sizes: Sizes) -> None:
        super().__init__()
        self.number, self.head = number, sizes.size // sizes.heads
        size, hidden = sizes.size, sizes.hidden
        self.norm1, self.norm2 = nn.RMSNorm(size), nn.RMSNorm(size)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(size, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, size, bias=False)

    def forward(self, x: torch.Tensor, spans: list[Span], angles: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (
            w(normed).view(len(x), -1, self.head).transpose(0, 1)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        parts = []
        for cache, row, rows in spans:
            here = slice(row, row + rows)
            cache.add(self.number, k[:, here], v[:, here])
            keys, values = cache.keys[self.number], cache.values[self.number]
            parts.append(scaled_dot_product_attention(q[:, here], keys, values, is_causal=rows > 1))
        x = x + self.wo(torch.cat(parts, 1).transpose(0, 1).flatten(1))
        normed = self.norm2(x)
        return x + self.w2(silu(self.w1(normed)) * self.w3(normed))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class Llama(nn.Module):
    """The model, with the layers of this rank. styles: the module with the parallel styles."""

    def __init__(self, sizes: Sizes, styles: object) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = sizes.size // sizes.heads
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.size)
        self.layers = nn.ModuleList(Block(number, sizes) for number in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.size)
        self.out = nn.Linear(sizes.size, sizes.vocabulary, bias=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {f"layers.*.{w}": styles.ColwiseParallel() for w in ("wq", "wk", "wv", "w1", "w3")}
        plan |= {f"layers.*.{w}": styles.RowwiseParallel() for w in ("wo", "w2")}
        torch_styles.parallelize_module(self, mesh, plan)

    @torch.no_grad()
    def step(self, sequences: list[tuple[Cache, list[int]]]) -> list[int]:
        """The likeliest next token of each sequence, after the given new tokens of each."""
        spans, positions, row = [], [], 0
        for cache, tokens in sequences:
            spans.append((cache, row, len(tokens)))
            positions += range(cache.length, cache.length + len(tokens))
            row += len(tokens)
        rates = 10000.0 ** (-torch.arange(self.head // 2) / (self.head // 2))
        angles = torch.tensor(positions)[:, None] * rates
        x = self.embedding(torch.tensor([t for _, tokens in sequences for t in tokens]))
        for layer in self.layers:
            x = layer(x, spans, angles)
        last = []
        for cache, first, rows in spans:
            cache.length += rows
            last.append(first + rows - 1)
        return self.out(self.norm(x[last])).argmax(-1).tolist()


def serve(rank: int, world: int, port: int, pipe: Connection, sizes: Sizes) -> None:
    """One rank: carries out the steps that it is told, until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its ranks
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model, caches = Llama(sizes, weft.nn), {}
    pipe.send(("ready", None, 0.0))
    while True:
        try:
            command, argument = pipe.recv()
        except EOFError:
            return
        started = time.perf_counter()
        try:
            made: object = None
            if command == "step":
                for number, _ in argument:
                    caches.setdefault(number, Cache())
                made = model.step([(caches[number], tokens) for number, tokens in argument])
            elif command == "drop":
                caches.pop(argument, None)
            elif command == "compare":
                made = compare(sizes, **argument)
            pipe.send(("made", made, time.perf_counter() - started))
        except weft.Error as error:
            pipe.send(("lost", f"{type(error).__name__}: {error}", 0.0))
            return


def compare(sizes: Sizes, prompt: int, tokens: int, batch: int, rounds: int) -> dict:
    """Tokens per second of prefill and decode, with torch's styles on gloo and with weft's. Both
    take turns, so that a slow moment does not affect only one."""
    models = {"torch": Llama(sizes, torch_styles), "weft": Llama(sizes, weft.nn)}
    seconds: dict = {name: {"prefill": [], "decode": []} for name in models}
    made: dict = {}
    random = torch.Generator().manual_seed(2)
    prompts = torch.randint(sizes.vocabulary, (batch, prompt), generator=random).tolist()
    for turn in range(rounds + 1):
        for name, model in models.items():
            caches, made[name] = [Cache() for _ in prompts], []
            dist.barrier()
            started = time.perf_counter()
            found = [model.step([pair])[0] for pair in zip(caches, prompts, strict=True)]
            prefilled = time.perf_counter()
            for _ in range(tokens):
                made[name].append(found)
                found = model.step([(c, [t]) for c, t in zip(caches, found, strict=True)])
            if turn:  # the first turn makes plans
                seconds[name]["prefill"].append((prefilled - started) / (batch * prompt))
                seconds[name]["decode"].append((time.perf_counter() - prefilled) / (tokens * batch))
    assert made["torch"] == made["weft"], "both ways give the same tokens"
    return {
        name: {phase: sorted(times)[len(times) // 2] for phase, times in phases.items()}
        for name, phases in seconds.items()
    }


class RanksLost(Exception):
    """A rank died or gave up; the message says which and why."""


class Ranks:
    """The processes of one tensor-parallel group."""

    def __init__(self, sizes: Sizes, world: int = 2) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            given = (rank, world, self.store.port, theirs, sizes)
            process = context.Process(target=serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._answers(within=120)

    def call(self, command: str, argument: object, within: float = 60) -> tuple[object, float]:
        """What rank 0 makes of a command that all ranks carry out, and its seconds."""
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((command, argument))
            except OSError:
                raise RanksLost(f"rank {rank} died") from None
        return self._answers(within)

    def _answers(self, within: float) -> tuple[object, float]:
        waiting, first = dict(zip(self.pipes, range(len(self.pipes)), strict=True)), (None, 0.0)
        until = time.monotonic() + within
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                raise RanksLost(f"ranks {sorted(waiting.values())} did not answer in {within:g} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    kind, made, seconds = pipe.recv()
                except (EOFError, OSError):
                    raise RanksLost(f"rank {rank} died") from None
                if kind == "lost":
                    raise RanksLost(f"rank {rank} lost its group ({made})")
                if rank == 0:
                    first = (made, seconds)
        return first

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
