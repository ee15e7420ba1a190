"""`weft.nn.parallelize`: tensor parallelism for a whole model, e.g. one of Hugging Face."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from weft.errors import Unsupported
from weft.nn import sharded
from weft.nn.expert_parallel import ExpertParallel, check_experts
from weft.nn.layer_outcomes import outcome
from weft.nn.model_report import LayerReport, ModelReport
from weft.nn.plans import plan_of, style_of, wildcard
from weft.nn.sequence import layers_of, split_sequence
from weft.nn.sharding import (
    Sharder,
    columns,
    is_linear,
    out_features,
    parameter_placement,
    rows,
    span,
)
from weft.nn.styles import ColwiseParallel, install_columns, install_rows
from weft.schedule import Schedule

TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Layers of one module that have the same input."""

_HEADS = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "c_attn", "query", "key", "value"}
_GATHERED = ("colwise_gather_output", "colwise_rep")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    *,
    expert_parallel: bool = False,
    schedule: str | Schedule = "auto",
    src_data_rank: int | None = 0,
) -> ModelReport:
    """Shards a model over a mesh, in place, with overlapped linear layers.

    Results, gradients and generated tokens are those of the model on one rank. Parameters become
    DTensors, as with torch's styles.

    Args:
        model: e.g. a model of Hugging Face, with all its weights on every rank.
        mesh: a mesh of one dimension, or with a dimension "tp".
        plan: the style of every layer by name, with `*` for numbers: a name of
            `weft.nn.plans.STYLES`, which are those of Hugging Face, or a `ParallelStyle`. None: the
            plan of the model (`tp_plan`).
        sequence_parallel: whether activations between attention and MLP are divided along the
            sequence, if its length allows that.
        expert_parallel: whether every rank holds some experts of a mixture whole
            (`ExpertParallel`), instead of a part of every expert.
        schedule: as in `weft.matmul_all_reduce`, for all layers.
        src_data_rank: the rank whose weights count, as in torch's `parallelize_module`. None: the
            weights are equal on all ranks already, and nothing is sent.

    Returns:
        what became of every layer: print it.
    """
    mesh = _line(mesh)
    chosen = plan_of(model, plan)
    work = _Work(model, mesh, str(schedule), Sharder(mesh, src_data_rank))
    work.read(chosen)
    if expert_parallel:
        work.keep_experts_whole()
    work.check()
    layers = layers_of(model, [wildcard(n) for n in work.modules]) if sequence_parallel else None
    work.shard()
    gathering: set[nn.Module] = set()
    if layers is not None:
        gathering = split_sequence(layers, work.styled, work.by)
    work.sharder.spread(model)
    if hasattr(model, "_tp_size"):
        vars(model)["_tp_size"] = mesh.size()  # transformers sizes static caches by it
    made = work.report(sequence_parallel, gathering)
    return ModelReport(type(model).__name__, mesh.size(), made, sequence_parallel)


def _line(mesh: DeviceMesh) -> DeviceMesh:
    """The one-dimensional mesh over which layers are divided."""
    if mesh.ndim == 1:
        return mesh
    if "tp" in (mesh.mesh_dim_names or ()):
        return mesh["tp"]
    raise Unsupported(
        f'the mesh has {mesh.ndim} dimensions and none is named "tp"; give one of them: mesh["..."]'
    )


@dataclass
class _Work:
    """A model while it is sharded."""

    model: nn.Module
    mesh: DeviceMesh
    schedule: str
    sharder: Sharder
    modules: dict[str, Any] = field(default_factory=dict)
    """The style of every module that the plan names."""
    parameters: dict[str, str] = field(default_factory=dict)
    """That of every parameter, as of the weights of experts."""
    styled: dict[nn.Module, Any] = field(default_factory=dict)
    """What every sharded module computes by."""
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The layers with one input, by the name of each."""

    def __post_init__(self) -> None:
        self.by = sharded.Quick(self.mesh)

    # -- what the plan says ------------------------------------------------------------------------

    def read(self, plan: Mapping[str, Any]) -> None:
        for name, module in self.model.named_modules():
            style = style_of(name, plan)
            if style is not None and style != "replicate":
                self.modules[name] = style
            for own, _ in module.named_parameters(recurse=False):
                full = f"{name}.{own}" if name else own
                direct = style_of(full, plan)
                if isinstance(direct, str) and direct != "replicate":
                    self.parameters[full] = direct
        self._tie()
        for name in self.modules:
            parent, _, last = name.rpartition(".")
            for group in TOGETHER:
                if last in group and name not in self.joined:
                    self._join(parent, group)

    def _join(self, parent: str, group: tuple[str, ...]) -> None:
        names = tuple(f"{parent}.{last}" if parent else last for last in group)
        if all(self.modules.get(name) == "colwise" for name in names):
            sizes = {getattr(self.model.get_submodule(name), "in_features", 0) for name in names}
            if len(sizes) == 1:
                self.joined.update(dict.fromkeys(names, names))

    def _tie(self) -> None:
        """A head and an embedding with one weight are divided in the same way."""
        holders: dict[nn.Parameter, list[str]] = {}
        for name, module in self.model.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                holders.setdefault(weight, []).append(name)
        for names in holders.values():
            divided = [name for name in names if self.modules.get(name) in _GATHERED]
            for name in names if divided else ():
                if isinstance(self.model.get_submodule(name), nn.Embedding):
                    self.modules[name] = "embedding_rowwise"

    def keep_experts_whole(self) -> None:
        """Divides experts among the ranks where the plan divides every expert."""
        experts = [name for name, style in self.modules.items() if style == "moe_tp_experts"]
        if not experts:
            raise Unsupported(
                "expert_parallel=True is for a mixture of experts, and the plan names no experts"
            )
        self.modules.update(dict.fromkeys(experts, "expert_parallel"))
        for name in [n for n in self.parameters if n.rpartition(".")[0] in experts]:
            del self.parameters[name]

    def check(self) -> None:
        """Raises unless the model can be sharded as the plan says. Nothing has changed yet."""
        world, config = self.mesh.size(), getattr(self.model, "config", None)
        if any(isinstance(p, DTensor) for p in self.model.parameters()):
            raise Unsupported("the model is sharded already; parallelize one that is not")
        attention = [n for n, s in self.modules.items() if n.rpartition(".")[2] in _HEADS]
        if attention and config is not None:
            for what in ("num_attention_heads", "num_key_value_heads"):
                heads = getattr(config, what, None)
                if isinstance(heads, int) and heads % world:
                    raise Unsupported(
                        f"{what} is {heads}, which {world} ranks cannot share evenly; use a number "
                        "of ranks that divides it"
                    )
        for name, style in self.modules.items():
            module, kind = self.model.get_submodule(name), str(style).partition(":")[0]
            linear = kind.startswith(("colwise", "rowwise", "packed_"))
            if isinstance(style, str) and linear and not is_linear(module):
                raise Unsupported(
                    f"the plan gives {name} the style {style!r}, but it is a "
                    f"{type(module).__name__} and no linear layer"
                )
            if kind == "expert_parallel":
                check_experts(module, world)
            if kind == "embedding_rowwise":
                count = getattr(module, "num_embeddings", 0)
                if not isinstance(module, nn.Embedding) or span(count, world - 1, world)[1] == 0:
                    raise Unsupported(
                        f"{name} cannot be divided by rows: it is a {type(module).__name__} of "
                        f"{count} rows for {world} ranks"
                    )

    # -- what becomes of it ------------------------------------------------------------------------

    def shard(self) -> None:
        for name, style in self.parameters.items():
            owner, _, own = name.rpartition(".")
            module = self.model.get_submodule(owner)
            self.sharder.shard(module, own, parameter_placement(module._parameters[own], style))
        for name, style in self.modules.items():
            module = self.model.get_submodule(name)
            if module in self.styled:
                continue
            if isinstance(style, str):
                self._apply(name, module, style)
            else:
                parallelize_module(module, self.mesh, style)
                self.styled[module] = style

    def _apply(self, name: str, module: nn.Module, style: str) -> None:
        kind, _, number = style.partition(":")
        turned = not isinstance(module, nn.Linear)
        if kind in ("colwise", "packed_colwise", *_GATHERED):
            parts = int(number or 2) if kind == "packed_colwise" else 1
            self._columns(name, module, kind, parts)
        elif kind in ("rowwise", "rowwise_split_input", "rowwise_rep"):
            for own in ("weight", "bias"):
                self._shard(module, own, rows, turned)
            made = sharded.Rows(self.schedule, self.by, divided=kind == "rowwise")
            install_rows(made, module, self.mesh)
            self.styled[module] = made
        else:
            self._install_other(module, kind)
            self.styled[module] = style

    def _columns(self, name: str, module: nn.Module, kind: str, parts: int) -> None:
        group = [self.model.get_submodule(n) for n in self.joined.get(name, (name,))]
        for one in group:
            for own in ("weight", "bias"):
                self._shard(one, own, columns, not isinstance(one, nn.Linear), parts)
        if kind in _GATHERED:
            size = out_features(module)
            made: ColwiseParallel = sharded.GatheredColumns(self.schedule, self.by, size)
        else:
            made = ColwiseParallel(schedule=self.schedule)
        install_columns(made, group, self.mesh)
        self.styled.update(dict.fromkeys(group, made))
        parent = vars(self.model.get_submodule(name.rpartition(".")[0]))
        if parts > 1 and isinstance(parent.get("split_size"), int):
            parent["split_size"] //= self.mesh.size()  # GPT-2 cuts the result of c_attn by it

    def _shard(self, module: nn.Module, own: str, place: Any, *how: Any) -> None:
        parameter = module._parameters.get(own)
        if parameter is not None:
            self.sharder.shard(module, own, place(parameter, *how))

    def _install_other(self, module: nn.Module, kind: str) -> None:
        by, world = self.by, self.mesh.size()
        if kind == "embedding_rowwise":
            assert isinstance(module, nn.Embedding)
            self.sharder.shard(module, "weight", Shard(0))
            mine = span(module.num_embeddings, self.mesh.get_local_rank(), world)
            if module.padding_idx is not None:
                place = module.padding_idx - mine[0]
                module.padding_idx = place if 0 <= place < mine[1] else None
            module.forward = partial(sharded.embedding_rows, module, mine, by)  # type: ignore[method-assign]
        elif kind == "embedding_colwise":
            size = module._parameters["weight"].shape[1]  # type: ignore[union-attr]
            self.sharder.shard(module, "weight", Shard(1))
            module.forward = partial(sharded.embedding_columns, module, size, by)
        elif kind == "expert_parallel":
            experts = ExpertParallel(input_layouts=Replicate(), schedule=self.schedule)
            experts.src_data_rank = self.sharder.source
            parallelize_module(module, self.mesh, experts)
        elif kind == "moe_tp_experts":
            module.forward = partial(sharded.experts, module, by)
        elif kind == "replicated_with_grad_allreduce":
            module.forward = partial(sharded.shared_parameters, module, by)
        elif kind == "mla_kv_a_proj":
            config: Any = self.model.config
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            rotary = text.qk_rope_head_dim
            module.forward = partial(sharded.latent_projection, module, rotary, by)
        elif kind == "all_reduce":
            module.forward = partial(sharded.summed_result, module, by)
        elif kind == "moe_identity_expert":
            module.forward = partial(sharded.shared_identity, module, world)

    # -- the report --------------------------------------------------------------------------------

    def report(self, sequence: bool, gathering: set[nn.Module]) -> tuple[LayerReport, ...]:
        rows: Counter[LayerReport] = Counter()
        for name, style in self.modules.items():
            names = self.joined.get(name, (name,))
            if name == names[0]:
                around = sequence and "*" in wildcard(name)
                parts = name.split(".")
                ahead = (".".join(parts[:i]) for i in range(1, len(parts)))
                gathers = any(self.model.get_submodule(n) in gathering for n in ahead)
                rows[outcome(names, style, around, gathers)] += 1
        for name, module in self.model.named_modules():
            mine = module not in self.styled and any(
                f"{name}.{own}" not in self.parameters
                for own, p in module._parameters.items()
                if p is not None
            )
            if mine:
                why = "every rank holds and computes all of it"
                rows[LayerReport(wildcard(name), 1, "", "local", "local", why)] += 1
        return tuple(
            LayerReport(row.name, count, row.style, row.forward, row.backward, row.why)
            for row, count in rows.items()
        )
