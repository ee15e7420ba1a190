"""Decoding with tensor parallelism, one sequence: every layer has two products whose results are
summed over the ranks (matmul_all_reduce), with a single row each.

    torchrun --nproc-per-node 2 examples/decode.py

The same tokens are decoded with `mm` and gloo's all_reduce; both ways print their speed. weft's
takes its fused path here: blocks of a product leave as they are made. With `--int8` the weights of
those products are kept in int8 with a scale per column, and read in a quarter of the bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention, silu

import weft

Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    dist.all_reduce(y)
    return y


class Decoder:
    """A stack of attention and MLP layers with a cache, this rank's heads and columns of it."""

    def __init__(self, size: int, num_layers: int, num_heads: int, vocabulary: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        shared = torch.Generator().manual_seed(1)

        def weight(rows: int, columns: int, cut: int | None) -> torch.Tensor:
            whole = torch.randn(rows, columns, generator=shared) / rows**0.5
            return whole if cut is None else whole.chunk(world, cut)[rank].contiguous()

        self.num_heads, self.head = num_heads // world, size // num_heads
        self.layers = [
            {
                "qkv": [weight(size, size, 1) for _ in range(3)],
                "o": weight(size, size, 0),
                "up": weight(size, 4 * size, 1),
                "down": weight(4 * size, size, 0),
            }
            for _ in range(num_layers)
        ]
        self.narrow: dict = {}
        self.embedding = weight(vocabulary, size, None) * vocabulary**0.5
        self.out = weight(size, vocabulary, None)

    def quantize(self) -> None:
        """Keeps the weights of summed products in int8, too."""
        for layer in self.layers:
            for name in ("o", "down"):
                w = layer[name]
                scale = w.abs().amax(0) / 127
                narrow = (w / scale).round().to(torch.int8).t().contiguous().t()
                self.narrow[w.data_ptr()] = (narrow, scale)

    def in_int8(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        narrow, scale = self.narrow[w.data_ptr()]
        return weft.matmul_all_reduce(x, narrow, scale=scale)

    def decode(self, first: int, count: int, reduce: Reduce) -> list[int]:
        """`count` tokens after the first, always the likeliest."""
        caches: list = [[] for _ in self.layers]
        tokens = [first]
        for _ in range(count):
            x = self.embedding[tokens[-1] : tokens[-1] + 1]
            for layer, cache in zip(self.layers, caches, strict=True):
                q, k, v = ((x @ w).view(self.num_heads, 1, self.head) for w in layer["qkv"])
                cache.append((k, v))
                keys, values = (torch.cat(parts, 1) for parts in zip(*cache, strict=True))
                attended = scaled_dot_product_attention(q, keys, values)
                x = x + reduce(attended.transpose(0, 1).reshape(1, -1), layer["o"])
                x = x / x.norm() * x.shape[-1] ** 0.5
                x = x + reduce(silu(x @ layer["up"]), layer["down"])
                x = x / x.norm() * x.shape[-1] ** 0.5
            tokens.append(int((x @ self.out).argmax()))
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--int8", action="store_true", help="also with weights in int8")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    decoder = Decoder(arguments.size, arguments.layers, num_heads=8, vocabulary=256)
    speeds, decoded = {}, {}
    with torch.no_grad():
        ways: dict[str, Reduce] = {"gloo": plain, "weft": weft.matmul_all_reduce}
        if arguments.int8:
            decoder.quantize()
            ways["weft, int8"] = decoder.in_int8
        for name, reduce in ways.items():
            decoder.decode(1, 2, reduce)
            dist.barrier()
            start = time.perf_counter()
            decoded[name] = decoder.decode(1, arguments.tokens, reduce)
            speeds[name] = arguments.tokens / (time.perf_counter() - start)
    assert decoded["gloo"] == decoded["weft"], f"different tokens: {decoded}"
    if dist.get_rank() == 0:
        for name, speed in speeds.items():
            print(f"{name}  {speed:.0f} tokens/s")
        print(weft.explain())
        print(f"both decode {decoded['weft'][:8]}...")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
