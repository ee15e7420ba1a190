"""A model as a list of layers with counts: a TOML file anyone can write, or what `huggingface`
makes of a `config.json`.

    op                      the sizes are those of the unsharded layer, and each rank has
    all_gather_matmul       M / world rows of X, N / world columns of W
    matmul_reduce_scatter   K / world columns of X and rows of W
    matmul_all_reduce       likewise
    all_to_all_matmul       M / world rows to multiply, after they were sent to their expert's rank
    matmul_all_to_all       likewise, before they are sent back
    gather_contract         M / world rows of X, N / world columns of the gradient (of the weight)
    matmul                  all of it: sizes of one rank, nothing is sent
    compute                 1 / world of `flops` and `bytes`: attention, norms
    collective              `size` bytes as its input, and nothing to hide it behind
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weft.dtype import ITEM_BYTES
from weft.errors import Unsupported, nearest
from weft.machine.description import DTYPES, Count
from weft.machine.loading import build
from weft.machine.toml_file import read_toml
from weft.plan.collective import UNROOTED

SHARED = {
    "all_gather_matmul": "n",
    "gather_contract": "n",
    "matmul_reduce_scatter": "k",
    "matmul_all_reduce": "k",
    "all_to_all_matmul": "m",
    "matmul_all_to_all": "m",
}
"""Operations that overlap, and which of their sizes the ranks share."""
OPS = (*SHARED, "matmul", "compute", "collective")
MOST = 1 << 48
_DTYPES = [name for name in DTYPES if name in ITEM_BYTES]


@dataclass(frozen=True)
class Layer:
    """One layer, `count` times in a step. `share` is what `compute` reaches of the GEMM rate."""

    name: str
    op: str
    count: Count = 1
    m: int = 0
    n: int = 0
    k: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    share: float = 0.5
    collective: str = "all_reduce"
    size: float = 0.0

    @property
    def overlaps(self) -> bool:
        """Whether it has communication that can hide behind its own compute."""
        return self.op in SHARED

    @property
    def sizes(self) -> str:
        """What it computes, in a few characters."""
        if self.op == "collective":
            return f"{self.collective} {self.size:.3g} B"
        if self.op == "compute":
            return f"{self.flops:.3g} flops"
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class Model:
    """The layers of a step over `world` ranks, and what was assumed to get at them."""

    title: str
    layers: tuple[Layer, ...]
    world: Count = 8
    dtype: str = "bfloat16"
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    """What a file may say."""

    title: str
    layers: tuple[Layer, ...]
    world: Count = 8
    dtype: str = "bfloat16"


def read_layers(path: str | Path) -> Model:
    """The model of a TOML file; examples/layers.toml shows every key."""
    path = Path(path)
    found = build(_File, {"title": path.stem, **read_toml(path)}, path.name)
    return checked(Model(found.title, found.layers, found.world, found.dtype), path.name)


def checked(model: Model, where: str) -> Model:
    """The model, unless a layer of it cannot be."""
    if not model.layers:
        raise Unsupported(f"{where}: there are no layers; add a [[layers]] table for each")
    for place, layer in enumerate(model.layers):
        _check_layer(layer, f"{where}: layers[{place}] ({layer.name})")
    if not 1 <= model.world <= 4096:
        raise Unsupported(f"{where}: world must be from 1 to 4096, not {model.world}")
    if model.dtype not in _DTYPES:
        raise Unsupported(
            f"{where}: there is no dtype {model.dtype!r} here{nearest(model.dtype, _DTYPES)}"
        )
    return model


def _check_layer(layer: Layer, where: str) -> None:
    if layer.op not in OPS:
        raise Unsupported(
            f"{where}: there is no op {layer.op!r}{nearest(layer.op, OPS)}; known: {', '.join(OPS)}"
        )
    if layer.overlaps or layer.op == "matmul":
        for axis in ("m", "n", "k"):
            size = getattr(layer, axis)
            if not 1 <= size <= MOST:
                raise Unsupported(f"{where}: {axis} must be from 1 to 2^48, not {size}")
    if layer.op == "compute":
        if layer.flops <= 0 and layer.bytes <= 0:
            raise Unsupported(f"{where}: compute needs flops or bytes, or both")
        if not 0 < layer.share <= 1:
            raise Unsupported(f"{where}: share must be more than 0 and at most 1")
    if layer.op == "collective":
        if layer.collective not in UNROOTED:
            raise Unsupported(
                f"{where}: there is no collective {layer.collective!r}"
                f"{nearest(layer.collective, UNROOTED)}; known: {', '.join(UNROOTED)}"
            )
        if layer.size < 1:
            raise Unsupported(f"{where}: a collective needs the size of its input in bytes")


def backward(layers: tuple[Layer, ...], world: int) -> tuple[Layer, ...]:
    """The layers of the backward pass: gradients are gathered where results were scattered, and the
    other way; each weight has a gradient of its own."""
    return tuple(one for layer in reversed(layers) for one in _backward(layer, world))


def _backward(layer: Layer, world: int) -> list[Layer]:
    inputs = replace(layer, name=f"{layer.name} dX", n=layer.k, k=layer.n)
    weights = replace(layer, name=f"{layer.name} dW")
    mine = {axis: _part(getattr(layer, axis), world) for axis in ("m", "n", "k")}
    here = {"m": layer.m, "n": layer.n, "k": layer.k}
    if layer.op in SHARED:
        axis = SHARED[layer.op]
        here[axis] = mine[axis]
    product = replace(weights, op="matmul", m=here["k"], n=here["n"], k=here["m"])
    mirrored = {
        "all_gather_matmul": "matmul_reduce_scatter",
        "matmul_reduce_scatter": "all_gather_matmul",
        "all_to_all_matmul": "matmul_all_to_all",
        "matmul_all_to_all": "all_to_all_matmul",
    }
    if layer.op == "all_gather_matmul":
        return [replace(inputs, op=mirrored[layer.op]), replace(weights, op="gather_contract")]
    if layer.op in mirrored:
        return [replace(inputs, op=mirrored[layer.op]), product]
    if layer.op == "matmul_all_reduce":
        return [replace(inputs, op="matmul", n=here["k"]), product]
    if layer.op == "matmul":
        return [replace(inputs, op="matmul"), product]
    if layer.op == "compute":  # attention: five products instead of two
        times = 2.5
        name = f"{layer.name} dX"
        return [replace(layer, name=name, flops=times * layer.flops, bytes=times * layer.bytes)]
    return [replace(layer, name=f"{layer.name} dX")]  # a collective: its gradient travels back


def _part(size: int, world: int) -> int:
    return -(-size // world)
