"""A small Llama-style transformer, and the two plans that shard it over ranks with tensor and
sequence parallelism: torch's parallel styles, and weft's. For the example and the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as plain
from torch.nn import functional

from weft.nn import styles

Kind = Literal["torch", "weft"]


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a model. size: the model dimension. hidden: the width of the gated MLPs."""

    size: int = 128
    hidden: int = 384
    num_heads: int = 4
    num_layers: int = 2
    vocabulary: int = 256


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings, over this rank's heads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head = shape.size // shape.num_heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(shape.size, shape.size, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(w(x)) for w in (self.wq, self.wk, self.wv))
        y = functional.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head).transpose(1, 2)


class GatedMLP(nn.Module):
    """w2(silu(w1(x)) * w3(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.size, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.size, bias=False)
        self.w3 = nn.Linear(shape.size, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.size), nn.RMSNorm(shape.size)
        self.attention, self.mlp = Attention(shape), GatedMLP(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, shape: LlamaShape, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(shape.vocabulary, shape.size)
            self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
            self.norm = nn.RMSNorm(shape.size)
            self.head = nn.Linear(shape.size, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of next-token prediction."""
        logits = self(tokens)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def parallelize(model: Llama, mesh: DeviceMesh, kind: Kind, schedule: str = "auto") -> Llama:
    """Shards a model over a mesh: the weights of layers, and activations between them along the
    sequence."""
    gather = plain.PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    scattered = Shard(1)
    plans = {
        "torch": {
            "attention": gather,
            "attention.w[qkv]": plain.ColwiseParallel(),
            "attention.wo": plain.RowwiseParallel(output_layouts=scattered),
            "mlp": gather,
            "mlp.w[13]": plain.ColwiseParallel(),
            "mlp.w2": plain.RowwiseParallel(output_layouts=scattered),
        },
        "weft": {
            "attention": styles.ColwiseTogether(
                "wq", "wk", "wv", input_layouts=Shard(1), schedule=schedule
            ),
            "attention.wo": styles.RowwiseParallel(output_layouts=scattered, schedule=schedule),
            "mlp": styles.ColwiseTogether("w1", "w3", input_layouts=Shard(1), schedule=schedule),
            "mlp.w2": styles.RowwiseParallel(output_layouts=scattered, schedule=schedule),
        },
    }
    columns = plain.ColwiseParallel if kind == "torch" else styles.ColwiseParallel
    plan = {
        "embedding": plain.RowwiseParallel(input_layouts=Replicate(), output_layouts=scattered),
        "norm": plain.SequenceParallel(),
        "head": columns(input_layouts=Shard(1), output_layouts=Replicate()),
        "layers.*.attention_norm": plain.SequenceParallel(),
        "layers.*.mlp_norm": plain.SequenceParallel(),
        **{f"layers.*.{name}": style for name, style in plans[kind].items()},
    }
    plain.parallelize_module(model, mesh, plan)
    return model


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Applies rotary position embeddings to x [batch, heads, sequence, size]."""
    sequence, half = x.shape[-2], x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(sequence, dtype=x.dtype)[:, None] * rates
    left, right = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
