"""`weft.nn.ExpertParallel` beside the blocks of transformers in one process, with gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft

pytest.importorskip("transformers")


def mixtral():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    return MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=8)
    )


def deepseek_v3():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    return DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=16,
            moe_intermediate_size=8,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=2,
            topk_group=1,
        )
    )


def deepseek_v2():
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    return DeepseekV2Moe(
        DeepseekV2Config(
            hidden_size=16,
            num_attention_heads=2,
            moe_intermediate_size=8,
            n_routed_experts=8,
            num_experts_per_tok=2,
        )
    )


def qwen3():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    return Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=16,
            num_attention_heads=2,
            moe_intermediate_size=8,
            num_experts=8,
            num_experts_per_tok=4,
        )
    )


class Experts(nn.Module):
    """Experts with the interface of transformers, whose import takes long on many ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(8, 24, 16))
        self.down_proj = nn.Parameter(torch.empty(8, 16, 12))
        self.act_fn = nn.SiLU()

    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for token, (some, shares) in enumerate(zip(index, weights, strict=True)):
            for expert, share in zip(some, shares, strict=True):
                gate, up = (self.gate_up_proj[expert] @ x[token]).chunk(2)
                made = self.down_proj[expert] @ (self.act_fn(gate) * up)
                y = y.index_add(0, torch.tensor([token]), (made * share)[None])
        return y


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 16))

    def forward(self, x):
        return x @ self.weight.t()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), Experts()

    def forward(self, x):
        rows = x.reshape(-1, 16)
        shares, index = self.gate(rows).softmax(-1).topk(2)
        return self.experts(rows, index, shares).view_as(x)


def plain():
    return Plain()


BLOCKS = {f.__name__: f for f in (plain, mixtral, deepseek_v3, deepseek_v2, qwen3)}


def made(name: str, dtype=torch.float32):
    """The block with the same random weights on every rank."""
    torch.manual_seed(3)
    block = BLOCKS[name]().to(dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


def close(ours, theirs) -> None:
    """Equal up to 1e-5 of the largest value."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def equals_the_block(name: str, replicated: bool, schedule: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = made(name)
    mesh = init_device_mesh("cpu", (world,))
    layout = Replicate() if replicated else Shard(0)
    style = weft.nn.ExpertParallel(input_layouts=layout, schedule=schedule)
    block = parallelize_module(copy.deepcopy(alone), mesh, {"experts": style})
    assert isinstance(block.experts.down_proj, DTensor)
    whole = torch.randn(2 * world, 5, 16, generator=torch.Generator().manual_seed(7))
    theirs = whole.clone().requires_grad_()
    want = alone(theirs)
    (want.sin() * want).sum().backward()
    own = whole if replicated else whole.chunk(world)[rank]
    ours = own.clone().requires_grad_()
    y = block(ours)
    (y.sin() * y).sum().backward()
    part = (lambda t: t) if replicated else (lambda t: t.chunk(world)[rank])
    close(y, part(want))
    close(ours.grad, part(theirs.grad))
    for weight in ("gate_up_proj", "down_proj"):
        mine = getattr(block.experts, weight).grad.to_local()
        wanted = getattr(alone.experts, weight).grad.chunk(world)[rank]
        close(mine, wanted)
    router = block.gate.weight.grad.clone()
    if not replicated:  # every rank has seen its own tokens only
        dist.all_reduce(router)
    close(router, alone.gate.weight.grad)
    with torch.inference_mode():
        close(block(own), part(want))
    with torch.no_grad():
        none = block.experts(own[:0, 0], torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
        assert none.shape == (0, 16)


@pytest.mark.parametrize("replicated", [False, True], ids=["own tokens", "same tokens"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_transformers(ranks, name, replicated):
    ranks(2).run(equals_the_block, name, replicated, "auto")


def test_four_ranks_and_a_fixed_schedule(ranks):
    ranks(4).run(equals_the_block, "plain", False, "adaptive@dma")
    ranks(4).run(equals_the_block, "plain", True, "serial@dma")


def half_precision() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = made("mixtral", torch.bfloat16)
    mesh = init_device_mesh("cpu", (world,))
    block = parallelize_module(copy.deepcopy(alone), mesh, {"experts": weft.nn.ExpertParallel()})
    torch.manual_seed(rank)
    x = torch.randn(1, 9, 16, dtype=torch.bfloat16)
    torch.testing.assert_close(block(x), alone(x), rtol=2e-2, atol=2e-2)


def dropped_tokens() -> None:
    """The index E drops a token, as in the module."""
    world = dist.get_world_size()
    alone, mesh = made("mixtral").experts, init_device_mesh("cpu", (world,))
    block = parallelize_module(copy.deepcopy(alone), mesh, weft.nn.ExpertParallel())
    index = torch.tensor([[0, 8], [8, 8], [7, 3]])
    x, weights = torch.randn(3, 16), torch.rand(3, 2)
    torch.testing.assert_close(block(x, index, weights), alone(x, index, weights))


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = []
    for module in (nn.Linear(2, 2), made("mixtral")):
        if hasattr(module, "experts"):
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(module.experts, name)
                module.experts.register_parameter(name, nn.Parameter(weight.data[:5]))
        with pytest.raises(weft.Unsupported) as error:
            parallelize_module(module, mesh, weft.nn.ExpertParallel())
        said.append(str(error.value))
    with pytest.raises(weft.Unsupported, match=r"Shard\(0\) or Replicate"):
        weft.nn.ExpertParallel(input_layouts=Shard(1))
    return said


def test_half_precision_dropped_tokens_and_refusals(ranks):
    ranks(2).run(half_precision)
    ranks(2).run(dropped_tokens)
    linear, odd = ranks(2).run(refused)[0]
    assert "Linear has no gate_up_proj" in linear
    assert odd == "5 experts cannot be shared out evenly among 2 ranks"
