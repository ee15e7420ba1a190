"""Whole models: layers from configs have the weights that the models have, and times add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.errors import Unsupported
from weft.machine import load
from weft.study.layers.huggingface import Run, from_config
from weft.study.layers.listing import SHARED, Layer, Model, backward, checked, read_layers
from weft.study.layers.timing import time_step

EXPERTS = {"dispatch, up", "down, combine", "experts, up", "experts, down"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "layers.toml"

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "sliding_window": None,
    "vocab_size": 151936,
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
}


def weights(config: dict[str, Any], world: int = 1) -> float:
    """Weights in the layers of a model, and as many again for tokens as for logits, in billions."""
    mode = "expert" if any("expert" in key for key in config) else "sequence"
    model = from_config(config, Run(1, 128, world, mode))
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or 0
    experts = experts or config.get("num_experts", 0)
    total = 0
    for layer in model.layers:
        held = layer.n * layer.k * layer.count
        held *= 2 if layer.name == "vocabulary" else 1
        held *= experts if layer.op in ("all_to_all_matmul", "matmul_all_to_all") else 1
        total += held
    return total / 1e9


@pytest.mark.parametrize(
    ("config", "billions"),
    [(LLAMA, 70.6), (MIXTRAL, 46.7), (DEEPSEEK, 671.0), (QWEN3_MOE, 235.0)],
)
def test_layers_hold_the_weights_that_the_model_is_known_for(
    config: dict[str, Any], billions: float
) -> None:
    assert weights(config) == pytest.approx(billions, rel=0.005)


def test_tied_embeddings_are_counted_once() -> None:
    whole = weights(GEMMA3) - 262208 * 5376 / 1e9  # Gemma makes logits with its embedding
    assert whole == pytest.approx(27.0, rel=0.005)


def multiplied(config: dict[str, Any]) -> int:
    """The weights of the matrices that transformers makes for a config, but for embeddings."""
    import torch
    import transformers

    own = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(own)
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    looked_up.add(id(model.get_output_embeddings().weight))
    held = [w for w in model.parameters() if w.dim() > 1 and id(w) not in looked_up]
    return sum(weight.numel() for weight in held)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("FalconConfig", {}),
        ("FalconConfig", {"multi_query": False, "ffn_hidden_size": None}),
        (
            "FalconConfig",
            {"new_decoder_architecture": True, "num_attention_heads": 64, "num_kv_heads": 8}
            | {"hidden_size": 4096},
        ),
        ("BloomConfig", {}),
        ("GPT2Config", {}),
        ("GPT2Config", {"n_inner": 1000}),
        ("GPTJConfig", {}),
        ("MptConfig", {}),
        ("OPTConfig", {}),
        ("GPTNeoXConfig", {}),
        ("PhiConfig", {}),
        ("Starcoder2Config", {}),
        (
            "DbrxConfig",
            {"attn_config": {"kv_n_heads": 4, "rope_theta": 1e4}}
            | {"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 3584}},
        ),
    ],
)
def test_layers_hold_the_weights_that_transformers_makes(name: str, change: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**change).to_dict()
    model = from_config(config, Run(1, 128, 1))
    experts = config.get("ffn_config", {}).get("moe_num_experts", 1)
    held = {
        layer.name: layer.n * layer.k * layer.count * (experts if layer.name in EXPERTS else 1)
        for layer in model.layers
        if layer.name != "vocabulary"
    }
    assert sum(held.values()) == multiplied(config), held


def test_older_names_of_sizes() -> None:
    old = {"n_embed": 64, "n_layer": 3, "n_head": 8}
    made = {x.name: x for x in from_config({"model_type": "bloom", **old}, Run(1, 128)).layers}
    assert [made["up"].n, made["up"].k, made["up"].count] == [256, 64, 3]
    mpt = {"model_type": "mpt", "d_model": 64, "n_layers": 3, "n_heads": 8, "expansion_ratio": 3}
    made = {x.name: x for x in from_config(mpt, Run(1, 128)).layers}
    assert [made["up"].n, made["up"].k, made["up"].count] == [192, 64, 3]
    falcon = {"model_type": "falcon", "hidden_size": 64, "n_layer": 3, "n_head": 8, "n_head_kv": 2}
    made = {x.name: x for x in from_config(falcon, Run(1, 128, 1)).layers}
    assert made["QKV"].n == (8 + 2 * 2) * 8
    with pytest.raises(Unsupported, match="n_head must be a whole number, not 'many'"):
        from_config({**falcon, "n_head": "many"}, Run(1, 128))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("JambaConfig", "mamba_d_state"),
        ("MambaConfig", "state_size"),
        ("BambaConfig", "mamba_n_heads"),
        ("Zamba2Config", "mamba_d_state"),
        ("FalconH1Config", "mamba_d_ssm"),
        ("Qwen3NextConfig", "linear_num_key_heads"),
        ("RecurrentGemmaConfig", "lru_width"),
        ("Lfm2Config", "conv_L_cache"),
    ],
)
def test_layers_that_are_not_understood_are_refused(name: str, key: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = {**getattr(transformers, name)().to_dict()}
    assert key in config
    begin = key.split("_")[0]
    with pytest.raises(Unsupported, match=f"{begin}_.* says .*list its layers in a TOML file"):
        from_config(config, Run(1, 128))


def test_a_size_of_each_layer_is_one_number_if_all_are_equal() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3nTextConfig().to_dict()
    sizes = config["intermediate_size"]
    assert len(sizes) == 35
    one = from_config({**config, "intermediate_size": sizes[0]}, Run(1, 128))
    assert from_config(config, Run(1, 128)) == one
    with pytest.raises(Unsupported, match="intermediate_size must be a whole number") as refused:
        from_config({**config, "intermediate_size": [8192, *sizes[1:]]}, Run(1, 128))
    assert len(str(refused.value)) < 150


def test_each_parallelism_shares_the_same_work() -> None:
    for parallelism, ops in (
        ("sequence", {"all_gather_matmul", "matmul_reduce_scatter"}),
        ("tensor", {"matmul", "matmul_all_reduce"}),
    ):
        model = from_config(LLAMA, Run(2, 1024, 8, parallelism))
        assert {layer.op for layer in model.layers if layer.op != "compute"} == ops
        flops = sum(2 * count_flops(layer, 8) for layer in model.layers)
        alone = from_config(LLAMA, Run(2, 1024, 1, parallelism))
        assert flops == pytest.approx(sum(2 * count_flops(layer, 1) for layer in alone.layers))


def count_flops(layer: Layer, world: int) -> float:
    """Products over all ranks; those of `matmul` are of one rank."""
    times = world if layer.op == "matmul" else 1
    return float(layer.count * times * layer.m * layer.n * layer.k)


def test_training_multiplies_three_times_as_much() -> None:
    for config in (LLAMA, MIXTRAL):
        for parallelism in ("sequence", "tensor"):
            layers = from_config(config, Run(1, 1024, 8, parallelism)).layers
            whole = (*layers, *backward(layers, 8))
            once = sum(count_flops(layer, 8) for layer in layers)
            assert sum(count_flops(layer, 8) for layer in whole) == pytest.approx(3 * once)


def test_windows_limit_attention() -> None:
    model = from_config(GEMMA3, Run(1, 8192, 8))
    near, far = (layer for layer in model.layers if layer.op == "compute")
    assert (near.name, near.count, far.count) == ("attention, 1024", 52, 10)
    assert far.flops == pytest.approx(4 * near.flops, rel=0.01)
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
    (attention,) = (x for x in from_config(mistral, Run(1, 8192)).layers if x.op == "compute")
    assert attention.name == "attention, 4096"
    unused = {**LLAMA, "sliding_window": 4096, "use_sliding_window": False}
    assert any(layer.name == "attention" for layer in from_config(unused, Run()).layers)


def test_decoding_attends_to_the_whole_cache() -> None:
    model = from_config(LLAMA, Run(64, 1, 8, context=8192))
    (attention,) = (layer for layer in model.layers if layer.op == "compute")
    assert attention.bytes == 64 * 8192 * 2 * 8 * 128 * 2
    assert attention.flops == 64 * 8192 * 4 * 64 * 128
    assert all(layer.m == 64 for layer in model.layers if layer.op in SHARED)


def test_dense_and_sparse_layers_are_told_apart() -> None:
    counts = {x.name: x.count for x in from_config(DEEPSEEK, Run(1, 128, 8, "expert")).layers}
    assert (counts["gate and up"], counts["dispatch, up"], counts["shared, down"]) == (3, 58, 58)
    every_other = {**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    counts = {x.name: x.count for x in from_config(every_other, Run(1, 128)).layers}
    assert (counts["gate and up"], counts["dispatch, up"]) == (48, 46)


@pytest.mark.parametrize(
    ("config", "run", "words"),
    [
        ({}, {}, "hidden_size is missing"),
        ({**LLAMA, "hidden_size": "big"}, {}, "hidden_size must be a whole number"),
        ({**LLAMA, "num_key_value_heads": 7}, {}, "no multiple"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, {}, "from 1 to 8, not 9"),
        (LLAMA, {"parallelism": "expert"}, "no experts to spread"),
        (LLAMA, {"parallelism": "tensr"}, "did you mean tensor"),
        (LLAMA, {"step": "backward"}, "no step 'backward'"),
        (LLAMA, {"batch": 0}, "batch must be from 1"),
        (LLAMA, {"sequence": 100, "context": 50}, "at least 100, not 50"),
    ],
)
def test_bad_configs(config: dict[str, Any], run: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        from_config(config, Run(**run))


def test_the_example_is_what_its_config_says() -> None:
    listed = read_layers(EXAMPLE)
    made = {x.name: x for x in from_config(LLAMA, Run(1, 8192, 8)).layers}
    assert [layer.name for layer in listed.layers] == list(made)
    for layer in listed.layers:
        other = made[layer.name]
        if layer.op == "compute":
            assert layer.flops == pytest.approx(other.flops, rel=0.01)
            assert layer.bytes == pytest.approx(other.bytes, rel=0.01)
        elif layer.name != "vocabulary":  # there for all tokens, as in training
            assert layer == other


SMALL = Model(
    "small",
    (
        Layer("in", "all_gather_matmul", 3, 4096, 8192, 4096),
        Layer("out", "matmul_reduce_scatter", 3, 4096, 4096, 8192),
        Layer("everywhere", "matmul_all_reduce", 1, 4096, 4096, 4096),
        Layer("dispatch", "all_to_all_matmul", 1, 8192, 4096, 2048),
        Layer("combine", "matmul_all_to_all", 1, 8192, 2048, 4096),
        Layer("gradient", "gather_contract", 1, 4096, 8192, 4096),
        Layer("own", "matmul", 2, 1024, 1024, 1024),
        Layer("attention", "compute", 1, flops=1e12, bytes=1e9),
        Layer("sum", "collective", 1, collective="all_reduce", size=1e8),
    ),
)


def test_a_step_is_the_sum_of_its_layers() -> None:
    step = time_step(load("h100"), checked(SMALL, "small"))
    for name in ("serial", "overlapped", "auto", "ideal"):
        total = sum(getattr(one, name) * one.layer.count for one in step.layers)
        assert getattr(step, name) == pytest.approx(total)
    assert step.ideal <= step.overlapped <= step.serial
    assert step.saves == pytest.approx(sum(one.saves for one in step.layers))
    for one in step.layers:
        assert (one.schedule is not None) == one.layer.overlaps
        if not one.layer.overlaps:
            assert one.serial == one.overlapped == one.auto > 0
    whole = step.to_json()
    assert [layer["name"] for layer in whole["layers"]] == [x.name for x in SMALL.layers]
    assert whole["saves_ms"] == pytest.approx(whole["serial_ms"] - whole["overlapped_ms"])


def test_too_many_ranks_and_bad_layers_are_refused() -> None:
    with pytest.raises(Unsupported, match="over 16 ranks; h100 has 8 devices"):
        time_step(load("h100"), Model("wide", SMALL.layers, world=16))
    for layer, words in (
        (Layer("x", "all_gather_mm", 1, 1, 1, 1), "did you mean all_gather_matmul"),
        (Layer("x", "matmul", 1, 0, 1, 1), "m must be from 1"),
        (Layer("x", "compute"), "needs flops or bytes"),
        (Layer("x", "collective"), "needs the size"),
        (Layer("x", "collective", collective="gather", size=1), "no collective 'gather'"),
    ):
        with pytest.raises(Unsupported, match=words):
            checked(Model("bad", (layer,)), "bad")
    with pytest.raises(Unsupported, match="there are no layers"):
        checked(Model("none", ()), "none")
