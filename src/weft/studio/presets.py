"""Layers of well-known models, and of a Hugging Face config that a reader drops onto the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.errors import Unsupported
from weft.study.layers.huggingface import Run, from_config

MOST_BYTES = 256 * 1024
"""The largest config that is read."""
TOKENS = 8192

_MODELS: dict[str, dict[str, Any]] = {
    # Sizes of the public configurations.
    "Llama-3-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
    "Llama-3-70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "Llama-3-405B": {
        "model_type": "llama",
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}

Layers = list[dict[str, Any]]


def presets(world: int) -> list[dict[str, Any]]:
    """The models that come with the studio, each with the layers that overlap."""
    found = [
        {"title": f"{name}, {TOKENS} tokens", "layers": layers_of(table, world)}
        for name, table in _MODELS.items()
    ]
    # DLRM-DCNv2 of MLPerf training: 26 tables of 128 columns, about 8 rows per lookup.
    dlrm = {"name": "embeddings", "op": "embedding_all_to_all", "m": 65536, "n": 3328, "k": 8}
    return [*found, {"title": "DLRM (MLPerf), 65536 samples", "layers": [dlrm]}]


def layers_of(table: Mapping[str, Any], world: int) -> Layers:
    """The layers of a config that have communication to hide."""
    model = from_config(table, Run(sequence=TOKENS, world=world))
    return [
        {"name": layer.name, "op": layer.op, "m": layer.m, "n": layer.n, "k": layer.k}
        for layer in model.layers
        if layer.overlaps
    ]


def read_config(text: bytes, world: int) -> dict[str, Any]:
    """The layers of a `config.json`, by its contents."""
    if len(text) > MOST_BYTES:
        raise Unsupported(f"a config has at most {MOST_BYTES // 1024} KiB")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise Unsupported("this file is not JSON; drop the config.json of a model") from None
    if not isinstance(table, dict):
        raise Unsupported("a config must hold a JSON object, as Hugging Face writes it")
    layers = layers_of(table, world)
    if not layers:
        raise Unsupported("no layer of this model has communication to hide")
    name = str(table.get("_name_or_path") or table.get("model_type") or "config.json")[:80]
    return {"title": f"{name}, {TOKENS} tokens", "layers": layers}
