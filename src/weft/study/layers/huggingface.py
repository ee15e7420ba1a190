"""The layers of a model from its Hugging Face `config.json`: dense transformers (Llama, Qwen,
Mistral, Gemma, and older ones such as GPT-2 and Falcon), also with latent attention, and mixtures
of experts (Mixtral, Qwen-MoE, DeepSeek, DBRX).

    parallelism   dense layers                                      experts
    sequence      tensor and sequence parallel: tokens are          spread over ranks: tokens go to
                  gathered before a layer, scattered after it       their experts and back
    tensor        tensor parallel: every rank has all tokens,       each cut over all ranks
                  results are summed by an all-reduce
    expert        every rank has its own tokens and all weights     spread over ranks
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.dtype import ITEM_BYTES
from weft.errors import Unsupported, nearest, printable
from weft.files import read_text
from weft.study.layers.listing import Layer, Model, backward, checked

PARALLELISMS = ("sequence", "tensor", "expert")
STEPS = ("forward", "train")
UNSIZED = frozenset({"falcon", "bloom", "gpt2", "gptj", "mpt"})
"""Model types whose MLPs are four times as wide as the model if their configs do not say it."""
UNGATED = UNSIZED | {"gpt_neox", "opt", "phi", "starcoder2"}
"""Model types whose MLPs have one matrix on the way up instead of two."""
OTHER_NAMES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "attn_config.kv_n_heads"),
    "intermediate_size": ("ffn_hidden_size", "ffn_dim", "n_inner"),
    "moe_intermediate_size": ("ffn_config.ffn_hidden_size",),
    "n_routed_experts": ("num_local_experts", "num_experts", "ffn_config.moe_num_experts"),
    "num_experts_per_tok": ("experts_per_token", "ffn_config.moe_top_k"),
}
"""What some models call a size. A point leads into an inner table."""
UNREAD = {
    "mamba_": "state-space layers",
    "ssm_": "state-space layers",
    "state_size": "state-space layers",
    "linear_num_": "linear attention",
    "linear_attn_": "linear attention",
    "lru_": "recurrent layers",
    "conv_L_": "convolutions",
}
"""What models have whose configs have keys that begin so. Its sizes are not understood here."""
LARGEST, MOST_LAYERS = 1 << 32, 1 << 16
"""The largest size, and the most layers, that a config may give. What is larger is a mistake."""


@dataclass(frozen=True)
class Run:
    """What a config does not say: sequences in a step over all ranks, tokens of each, and how the
    work is shared. `context` is what each token attends to; None means its own sequence."""

    batch: int = 1
    sequence: int = 8192
    world: int = 8
    parallelism: str = "sequence"
    step: str = "forward"
    context: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "world"):
            value = getattr(self, name)
            if not 1 <= value <= 1 << 32:
                raise Unsupported(f"{name} must be from 1 to 2^32, not {value}")
        if self.context is not None and self.context < self.sequence:
            raise Unsupported(
                f"context counts the tokens of the sequence too: at least {self.sequence}, "
                f"not {self.context}"
            )
        for name, known in (("parallelism", PARALLELISMS), ("step", STEPS)):
            value = getattr(self, name)
            if value not in known:
                raise Unsupported(
                    f"there is no {name} {value!r}{nearest(value, known)}; "
                    f"known: {', '.join(known)}"
                )

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


def read_config(path: str | Path, run: Run) -> Model:
    """The layers of one step of the model that a `config.json` describes."""
    path = Path(path)
    text = read_text(path)
    try:
        table = json.loads(text)
    except ValueError as error:  # also of numbers with thousands of digits
        raise Unsupported(f"{path.name} is not a JSON file: {error}") from error
    except RecursionError:
        raise Unsupported(f"{path.name} nests its values too deeply") from None
    if not isinstance(table, dict):
        raise Unsupported(f"{path.name} must hold a JSON object, as Hugging Face writes it")
    return from_config(table, run, path.name)


def from_config(table: Mapping[str, Any], run: Run, where: str = "config.json") -> Model:
    """The layers of one step of a model, from the contents of its config."""
    config = _Config(table, where)
    layers = _Layers(config, run).all()
    if run.step == "train":
        layers = (*layers, *backward(layers, run.world))
    dtype = run.dtype or config.dtype
    sizes = f"{run.batch} x {run.sequence} tokens"
    title = f"{config.title}, {run.step}, {sizes}, {run.parallelism} parallel"
    model = Model(title, layers, run.world, dtype, tuple(_assumed(config, run)))
    return checked(model, where)


class _Config:
    """The sizes of a model, by one name each."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        inner = table.get("text_config")  # models that see keep what reads in a table of its own
        self.table = {**table, **inner} if isinstance(inner, Mapping) else dict(table)
        for key, value in [*self.table.items()]:
            if isinstance(value, Mapping):
                self.table |= {f"{key}.{name}": one for name, one in value.items()}
        self.where = where
        self._check_kinds()
        self.kind = str(self.table.get("model_type", "transformer"))
        self.hidden = self.count("hidden_size")
        self.layers = self.count("num_hidden_layers", most=MOST_LAYERS)
        self.heads = self.count("num_attention_heads")
        self.kv_heads = self._kv_heads()
        if not self.kv_heads or self.heads % self.kv_heads:
            raise Unsupported(
                f"{where}: num_attention_heads ({self.heads}) is no multiple of "
                f"num_key_value_heads ({self.kv_heads})"
            )
        self.head = self.count("head_dim", default=max(1, self.hidden // self.heads))
        self.vocabulary = self.count("vocab_size", default=0)
        self.experts = self.count("n_routed_experts", default=0)
        self.top_k = self.count("num_experts_per_tok", default=0)
        self.ups = 1 if self.kind in UNGATED else 2
        self.expert_ffn = self.ffn = 0
        if self.experts > 1:
            if not 1 <= self.top_k <= self.experts:
                raise Unsupported(
                    f"{where}: num_experts_per_tok must be from 1 to {self.experts}, "
                    f"not {self.top_k}"
                )
            self.expert_ffn = self.count("moe_intermediate_size", "intermediate_size")
        self.dense_layers = self._dense_layers()
        if self.dense_layers:
            usual = self.hidden * self.count("expansion_ratio", default=4)
            unsized = usual if self.kind in UNSIZED else None
            self.ffn = self.count("intermediate_size_mlp", "intermediate_size", default=unsized)
        self.shared_ffn = self.count("shared_expert_intermediate_size", default=0) or (
            self.count("n_shared_experts", default=0) * self.expert_ffn
        )

    def _check_kinds(self) -> None:
        """Raises unless all layers are of kinds that are understood here."""
        for key, value in self.table.items():
            kind = next((kind for begin, kind in UNREAD.items() if key.startswith(begin)), None)
            if kind is not None and value is not None:
                raise Unsupported(
                    f"{self.where}: {key} says that the model has {kind}, whose sizes are not "
                    "understood here; list its layers in a TOML file"
                )

    def _kv_heads(self) -> int:
        if self.table.get("multi_query") and not self.table.get("new_decoder_architecture"):
            return 1
        return self.count("num_key_value_heads", default=self.heads)

    def count(self, *names: str, default: int | None = None, most: int = LARGEST) -> int:
        """The first of these keys that is there, also by another name, as a whole number. A list
        gives it for each layer, and is one number if all are equal."""
        for name in (one for usual in names for one in (usual, *OTHER_NAMES.get(usual, ()))):
            value = self.table.get(name)
            if value is None:
                continue
            if isinstance(value, list) and value and all(one == value[0] for one in value):
                value = value[0]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise Unsupported(
                    f"{self.where}: {name} must be a whole number, not {reprlib.repr(value)}"
                )
            if value == 0 and default is None:
                raise Unsupported(f"{self.where}: {name} must be at least 1, not 0")
            if value > most:
                raise Unsupported(f"{self.where}: {name} must be at most {most}")
            return value
        if default is None:
            raise Unsupported(
                f"{self.where}: {' or '.join(names)} is missing; it is needed to know the layers"
            )
        return default

    @property
    def title(self) -> str:
        named = self.table.get("_name_or_path") or self.kind
        return printable(str(named))

    @property
    def dtype(self) -> str:
        named = self.table.get("torch_dtype") or self.table.get("dtype") or "bfloat16"
        return named if isinstance(named, str) and named in ITEM_BYTES else "bfloat16"

    @property
    def latent(self) -> bool:
        """Whether keys and values are made from a small latent (MLA)."""
        return self.table.get("kv_lora_rank") is not None

    def _dense_layers(self) -> int:
        """How many layers have a plain MLP."""
        if self.experts <= 1:
            return self.layers
        first = self.count("first_k_dense_replace", default=0)
        every = self.count("moe_layer_freq", "decoder_sparse_step", default=1)
        if (step := self.table.get("interleave_moe_layer_step")) is not None:
            every = self.count("interleave_moe_layer_step") if step else 1
        listed = self.table.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(isinstance(one, int) for one in listed):
            raise Unsupported(f"{self.where}: mlp_only_layers must be a list of whole numbers")
        plain = {number for number in range(self.layers) if number < first}
        # Layers that every `every`-th one is sparse of: the last of each group, or the first where
        # the config counts from `first_k_dense_replace` on.
        offset = 0 if "moe_layer_freq" in self.table else 1
        plain |= {n for n in range(self.layers) if (n + offset) % max(1, every)}
        plain |= {number for number in listed if 0 <= number < self.layers}
        return len(plain)

    def windows(self) -> list[tuple[int | None, int]]:
        """(tokens that a token attends to at most, layers), None where there is no limit."""
        used = self.table.get("use_sliding_window") is not False
        window = self.count("sliding_window", default=0) if used else 0
        if not window:
            return [(None, self.layers)]
        listed = self.table.get("layer_types")
        if isinstance(listed, list):
            sliding = sum("sliding" in str(one) for one in listed[: self.layers])
        elif self.kind == "gemma2":
            sliding = (self.layers + 1) // 2
        elif self.kind.startswith("gemma3"):
            every = self.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
            sliding = self.layers - self.layers // max(1, every)
        else:
            sliding = self.layers
        found = [(window, sliding), (None, self.layers - sliding)]
        return [(limit, count) for limit, count in found if count]


class _Layers:
    """The layers of a forward pass, in the order of a block."""

    def __init__(self, config: _Config, run: Run) -> None:
        self.config, self.run = config, run
        self.mode = run.parallelism
        self.own = -(-run.tokens // run.world)  # tokens of a rank, where they are shared out
        if self.mode == "expert" and config.experts <= 1:
            raise Unsupported(
                f"{config.where} has no experts to spread; use --parallelism sequence or tensor"
            )

    def all(self) -> tuple[Layer, ...]:
        config = self.config
        found = [*self._latent()] if config.latent else [self._in("QKV", self._qkv(), "hidden")]
        found += self._attention()
        width = config.heads * (config.count("v_head_dim") if config.latent else config.head)
        found.append(self._out("projection", width))
        if config.dense_layers:
            count = config.dense_layers
            up = "gate and up" if config.ups == 2 else "up"
            found.append(self._in(up, config.ups * config.ffn, "hidden", count))
            found.append(self._out("down", config.ffn, count))
        if config.dense_layers < config.layers:
            found += self._experts(config.layers - config.dense_layers)
        if config.vocabulary:
            found.append(self._vocabulary())
        return tuple(found)

    def _qkv(self) -> int:
        """Columns of Q, K and V. Ranks that outnumber the heads of keys hold copies of them."""
        config = self.config
        copies = max(config.kv_heads, self.run.world) if self.mode != "expert" else config.kv_heads
        return (config.heads + 2 * copies) * config.head

    def _in(self, name: str, n: int, k: str | int, count: int | None = None) -> Layer:
        """A layer whose columns the ranks share: tokens come in."""
        config, run = self.config, self.run
        count = config.layers if count is None else count
        depth = config.hidden if isinstance(k, str) else k
        if self.mode == "sequence":
            return Layer(name, "all_gather_matmul", count, run.tokens, n, depth)
        if self.mode == "tensor":
            return Layer(name, "matmul", count, run.tokens, -(-n // run.world), depth)
        return Layer(name, "matmul", count, self.own, n, depth)

    def _out(self, name: str, k: int, count: int | None = None) -> Layer:
        """A layer whose rows of weights the ranks share: results are summed."""
        config, run = self.config, self.run
        count = config.layers if count is None else count
        ops = {"sequence": "matmul_reduce_scatter", "tensor": "matmul_all_reduce"}
        if self.mode == "expert":
            return Layer(name, "matmul", count, self.own, config.hidden, k)
        return Layer(name, ops[self.mode], count, run.tokens, config.hidden, k)

    def _latent(self) -> list[Layer]:
        """Latent attention: what leads to the latents has its weights on every rank."""
        config = self.config
        rope, nope = config.count("qk_rope_head_dim"), config.count("qk_nope_head_dim")
        queries, latent = config.count("q_lora_rank", default=0), config.count("kv_lora_rank")
        values = config.count("v_head_dim")
        rows = self.run.tokens if self.mode == "tensor" else self.own
        down = queries + latent + rope
        found = [Layer("latents", "matmul", config.layers, rows, down, config.hidden)]
        width = config.heads * (nope + rope)
        found.append(self._in("Q", width, queries) if queries else self._in("Q", width, "hidden"))
        found.append(self._in("K and V", config.heads * (nope + values), latent))
        return found

    def _attention(self) -> list[Layer]:
        config, run = self.config, self.run
        keys = values = config.head
        held = 2 * config.kv_heads * config.head  # cached elements of a token
        if config.latent:
            keys = config.count("qk_rope_head_dim") + config.count("qk_nope_head_dim")
            values = config.count("v_head_dim")
            held = config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
        whole = run.context or run.sequence
        item = ITEM_BYTES[run.dtype or config.dtype]
        found = []
        for window, count in config.windows():
            reach = whole if window is None else min(whole, window)
            # A token attends to those before it: of its own sequence to half, as a mean.
            before = whole - run.sequence
            mean = min(before + (run.sequence + 1) / 2, reach)
            flops = 2.0 * run.tokens * mean * config.heads * (keys + values)
            traffic = float(run.batch * reach * held * item)
            name = "attention" if window is None else f"attention, {window}"
            found.append(Layer(name, "compute", count, flops=flops, bytes=traffic))
        return found

    def _experts(self, count: int) -> list[Layer]:
        config, run = self.config, self.run
        rows = run.tokens * config.top_k
        here = run.tokens if self.mode == "tensor" else self.own
        found = [Layer("router", "matmul", count, here, config.experts, config.hidden)]
        wide = config.ups * config.expert_ffn
        if self.mode == "tensor":
            # Each expert is cut over all ranks. Sums over a token's experts are sums over K too.
            wide = -(-wide // run.world)
            found.append(Layer("experts, up", "matmul", count, rows, wide, config.hidden))
            inner = config.top_k * config.expert_ffn
            sizes = (run.tokens, config.hidden, inner)
            found.append(Layer("experts, down", "matmul_all_reduce", count, *sizes))
        else:
            sizes = (rows, wide, config.hidden)
            found.append(Layer("dispatch, up", "all_to_all_matmul", count, *sizes))
            sizes = (rows, config.hidden, config.expert_ffn)
            found.append(Layer("down, combine", "matmul_all_to_all", count, *sizes))
        if config.shared_ffn:
            found.append(self._in("shared, up", config.ups * config.shared_ffn, "", count))
            found.append(self._out("shared, down", config.shared_ffn, count))
        return found

    def _vocabulary(self) -> Layer:
        config, run = self.config, self.run
        # Without training only the last token of a sequence is wanted.
        rows = run.tokens if run.step == "train" else run.batch
        if self.mode == "expert":
            sizes = (-(-rows // run.world), config.vocabulary, config.hidden)
            return Layer("vocabulary", "matmul", 1, *sizes)
        if self.mode == "tensor":
            sizes = (rows, -(-config.vocabulary // run.world), config.hidden)
            return Layer("vocabulary", "matmul", 1, *sizes)
        return Layer("vocabulary", "all_gather_matmul", 1, rows, config.vocabulary, config.hidden)


def _assumed(config: _Config, run: Run) -> list[str]:
    """What the layers leave out or take for granted."""
    said = [
        "norms, rotary embeddings, activations and the lookup of tokens are left out",
        "attention reaches half of the GEMM rate",
    ]
    if run.step == "train":
        said.append(
            "gradients are not summed between data-parallel groups, nothing is computed twice, "
            "and the optimizer is left out"
        )
    else:
        said.append("logits are made for the last token of each sequence")
    if config.experts > 1:
        rows = run.tokens * config.top_k / config.experts
        said.append(
            f"tokens are spread evenly over {config.experts} experts, {rows:.0f} rows each, and "
            "the experts of a rank are multiplied as one GEMM, which is too kind where an expert "
            "has few rows"
        )
    return said
