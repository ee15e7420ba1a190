"""Tiny models of transformers with random weights, one for each architecture."""

from __future__ import annotations

import warnings

import torch

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8}),
    "mixtral": ("Mixtral", EXPERTS),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "gpt2": ("GPT2LMHead", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}


def tiny(name: str, dtype=torch.float32, **changes):
    """A tiny model, the same on every rank, and in a state that makes differences visible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    transformers.logging.set_verbosity_error()
    family, options = ARCHITECTURES[name]
    sizes = {**SIZES, **options, **changes}
    if family == "GPT2LMHead":
        config = transformers.GPT2Config(
            vocab_size=sizes["vocab_size"],
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=None,
            **options,
        )
        kind = transformers.GPT2LMHeadModel
    else:
        config = getattr(transformers, f"{family}Config")(**sizes)
        kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(1)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():  # standard weights hardly matter at this size
            noise = torch.randn_like(parameter)
            parameter.add_(noise * (0.2 if parameter.dim() > 1 else 0.1))
    return model.to(dtype).eval()
