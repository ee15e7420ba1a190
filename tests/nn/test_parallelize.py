"""Models of transformers under `weft.nn.parallelize` give what they give on one rank: logits,
gradients, tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tiny_models import ARCHITECTURES, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import weft
import weft.nn

pytest.importorskip("transformers")


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def ids(batch, length, seed=5):
    return torch.randint(2, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def error(got, want):
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


def gradients(model, tokens):
    """The logits, and the gradients of all parameters, whole; those of two passes, added up."""
    model.zero_grad()
    for part in tokens.chunk(2):
        output = model(input_ids=part, labels=part)
        output.loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return output.logits.detach(), found


def alike(name):
    """One architecture: with and without sequence parallelism, forward, backward and generate."""
    alone = tiny(name)
    tokens = ids(4, 8)
    logits, wanted = gradients(alone, tokens)
    with torch.no_grad():
        greedy = alone.generate(tokens[:2, :5], max_new_tokens=5, do_sample=False)
    reports = []
    for sequence in (False, True):
        model = tiny(name)
        if dist.get_rank():  # the weights of rank 0 count
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        reports.append(weft.nn.parallelize(model, mesh(), sequence_parallel=sequence))
        got, found = gradients(model, tokens)
        assert error(got, logits) < 1e-5
        assert found.keys() == wanted.keys()
        for key, gradient in found.items():
            assert error(gradient, wanted[key]) < 1e-5, key
        with torch.no_grad():
            assert torch.equal(
                model.generate(tokens[:2, :5], max_new_tokens=5, do_sample=False), greedy
            )
    rounded(name)
    return [str(report) for report in reports]


def rounded(name):
    """In bfloat16, a sharded model is as near to float32 as a whole one."""
    tokens = ids(2, 8)
    with torch.no_grad():
        exact = tiny(name)(input_ids=tokens).logits
        half = tiny(name, torch.bfloat16)
        allowed = error(half(input_ids=tokens).logits, exact)
        weft.nn.parallelize(half, mesh(), src_data_rank=None)
        assert error(half(input_ids=tokens).logits, exact) < 1.5 * allowed + 2**-8


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(ranks, name, world):
    for plain, sequence in ranks(world).run(alike, name, within=180):
        for text in (plain, sequence):
            assert all(len(line) <= 80 for line in text.splitlines())
            assert text.endswith("are not.")
        assert "matmul_all_reduce" in plain
        assert "matmul_reduce_scatter" in sequence


def experts_kept_whole(name):
    """The same with whole experts on every rank: logits, gradients, tokens."""
    alone, tokens = tiny(name), ids(4, 8)
    logits, wanted = gradients(alone, tokens)
    for sequence in (False, True):
        model = tiny(name)
        report = weft.nn.parallelize(
            model, mesh(), sequence_parallel=sequence, expert_parallel=True, src_data_rank=None
        )
        (row,) = (layer for layer in report.layers if layer.style == "expert_parallel")
        assert row.forward == row.backward == "all_reduce"
        weights = [m.gate_up_proj for m in model.modules() if hasattr(m, "gate_up_proj")]
        mine = {len(w.to_local()) for w in weights}
        assert mine == {4 // dist.get_world_size()}
        got, found = gradients(model, tokens)
        assert error(got, logits) < 1e-5
        for key, gradient in found.items():
            assert error(gradient, wanted[key]) < 1e-5, key
    with torch.no_grad():
        how = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(
            model.generate(tokens[:2, :5], **how), alone.generate(tokens[:2, :5], **how)
        )
    with pytest.raises(weft.Unsupported, match="names no experts"):
        weft.nn.parallelize(tiny("llama"), mesh(), expert_parallel=True)


@pytest.mark.parametrize(("name", "world"), [("mixtral", 2), ("deepseek-v3", 2), ("mixtral", 4)])
def test_experts_kept_whole(ranks, name, world):
    ranks(world).run(experts_kept_whole, name, within=180)


def generations(name):
    """Everything that people ask of `generate`, beside one rank."""
    alone, model = tiny(name), tiny(name)
    weft.nn.parallelize(model, mesh(), src_data_rank=None)
    prompts = [ids(1, 4), ids(3, 6), ids(2, 5)]
    padded = torch.ones_like(prompts[1])
    padded[0, :2] = 0
    for options in (
        {},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_beams": 2, "cache_implementation": "static"},
        {"use_cache": False},
        {"num_return_sequences": 2, "num_beams": 2},
    ):
        for number, prompt in enumerate(prompts):
            how = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True, **options}
            if number == 1:
                how["attention_mask"] = padded
            with torch.inference_mode():
                assert torch.equal(model.generate(prompt, **how), alone.generate(prompt, **how))
    torch.manual_seed(3)
    sampled = model.generate(prompts[0], max_new_tokens=4, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(sampled, alone.generate(prompts[0], max_new_tokens=4, do_sample=True))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_generate(ranks, name):
    ranks(2).run(generations, name, within=180)


def in_modes():
    """Inference mode, autocast and gradient checkpointing, beside one rank."""
    alone, model = tiny("llama-tied"), tiny("llama-tied")
    weft.nn.parallelize(model, mesh(), sequence_parallel=True)
    tokens = ids(2, 8)
    with torch.inference_mode():
        assert error(model(tokens).logits, alone(tokens).logits) < 1e-5
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = model(tokens).logits, alone(tokens).logits
        assert got.dtype == want.dtype == torch.bfloat16
        assert error(got, want) < 2**-5
    assert model.lm_head.weight is model.model.embed_tokens.weight
    _, wanted = gradients(alone, tokens)
    for module in (model, copy.deepcopy(model)):
        module.gradient_checkpointing_enable()
        module.train()
        for key, gradient in gradients(module, tokens)[1].items():
            assert error(gradient, wanted[key]) < 1e-5, key


def test_modes_tied_weights_and_checkpointing(ranks):
    ranks(2).run(in_modes, within=120)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, hidden_states):
        return self.norm(hidden_states + self.down(self.up(hidden_states).relu()))


class Own(nn.Module):
    """A model that brings no plan."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def planned():
    torch.manual_seed(2)
    alone = Own()
    x = torch.randn(2, 4, 6)
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    heads = {"head": "colwise_gather_output"}
    style = {"head": weft.nn.ColwiseParallel(output_layouts=Replicate())}
    for more in (heads, style):
        model = copy.deepcopy(alone)
        report = weft.nn.parallelize(model, mesh(), {**plan, **more})
        torch.testing.assert_close(model(x), alone(x))
        assert [layer.count for layer in report.overlapped] == [2, 2]
        assert [layer.name for layer in report.not_overlapped] == ["head"]
        assert [layer.name for layer in report.replicated] == ["layers.*.norm"]


def test_a_plan_of_ones_own(ranks):
    ranks(2).run(planned)


def refused(changes, plan, message, sequence):
    model = Own() if changes is None else tiny("llama", **changes)
    before = [(name, id(p)) for name, p in model.named_parameters()]
    with pytest.raises(weft.Unsupported, match=message):
        weft.nn.parallelize(model, mesh(), plan, sequence)
    assert before == [(name, id(p)) for name, p in model.named_parameters()]


@pytest.mark.parametrize(
    ("changes", "plan", "message", "sequence"),
    [
        ({"num_key_value_heads": 1}, None, "num_key_value_heads is 1, which 2 ranks", False),
        (None, None, "Own brings no plan", False),
        (None, {"head": "columnwise"}, "no style 'columnwise'.*did you mean", False),
        (None, {"layers.*.upp": "colwise"}, r"did you mean layers\.\*\.up", False),
        (None, {"layers.*.norm": "colwise"}, "no linear layer", False),
        (None, {"head": 3}, "the style of 'head' is a int", False),
        (None, {"head": "colwise"}, "one list of layers", True),
    ],
)
def test_what_cannot_be_sharded_is_refused(ranks, changes, plan, message, sequence):
    ranks(2).run(refused, changes, plan, message, sequence)
