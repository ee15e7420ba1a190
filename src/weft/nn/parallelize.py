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
from torch.distributed.tensor.placement_types import Placement

from weft.errors import Unsupported
from weft.nn import sharded
from weft.nn.model_report import LayerReport, ModelReport
from weft.nn.plans import plan_of, style_of, wildcard
from weft.nn.sequence import layers_of, split_sequence
from weft.nn.sharding import Sharder, columns, rows
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
_AFTERWARDS = "its columns are gathered after the product, which weft does not overlap"
_LOOKUP = "a lookup has no product that could hide its {}"
_EXPERTS = "the results of the experts are summed when all of them are done"
_SINGLE = "only its gradient is summed, behind the backward of other layers"
_OTHERS = "a style of yours; see its own description"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    *,
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
    work.check()
    layers = layers_of(model, [wildcard(n) for n in work.modules]) if sequence_parallel else None
    work.shard()
    gathering: list[str] = []
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
            if isinstance(style, str) and linear and not _is_linear(module):
                raise Unsupported(
                    f"the plan gives {name} the style {style!r}, but it is a "
                    f"{type(module).__name__} and no linear layer"
                )
            if kind == "embedding_rowwise":
                count = getattr(module, "num_embeddings", 0)
                if not isinstance(module, nn.Embedding) or _span(count, world - 1, world)[1] == 0:
                    raise Unsupported(
                        f"{name} cannot be divided by rows: it is a {type(module).__name__} of "
                        f"{count} rows for {world} ranks"
                    )

    # -- what becomes of it ------------------------------------------------------------------------

    def shard(self) -> None:
        for name, style in self.parameters.items():
            owner, _, own = name.rpartition(".")
            module = self.model.get_submodule(owner)
            self.sharder.shard(module, own, _parameter_placement(module._parameters[own], style))
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
            size = _out_features(module)
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
            span = _span(module.num_embeddings, self.mesh.get_local_rank(), world)
            if module.padding_idx is not None:
                inside = 0 <= module.padding_idx - span[0] < span[1]
                module.padding_idx = module.padding_idx - span[0] if inside else None
            module.forward = partial(sharded.embedding_rows, module, span, by)  # type: ignore[method-assign]
        elif kind == "embedding_colwise":
            size = module._parameters["weight"].shape[1]  # type: ignore[union-attr]
            self.sharder.shard(module, "weight", Shard(1))
            module.forward = partial(sharded.embedding_columns, module, size, by)
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

    def report(self, sequence: bool, gathering: list[str]) -> tuple[LayerReport, ...]:
        rows: Counter[LayerReport] = Counter()
        for name, style in self.modules.items():
            names = self.joined.get(name, (name,))
            if name == names[0]:
                rows[self._row(name, names, style, sequence, gathering)] += 1
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

    def _row(
        self, name: str, names: tuple[str, ...], style: Any, sequence: bool, gathering: list[str]
    ) -> LayerReport:
        shown = wildcard(name)
        if len(names) > 1:
            shown = f"{shown.rpartition('.')[0]}.{_in_braces([n.split('.')[-1] for n in names])}"
        if not isinstance(style, str):
            return LayerReport(shown, 1, type(style).__name__, "its own", "its own", _OTHERS)
        kind = style.partition(":")[0]
        scattered = sequence and "*" in shown and not any(f".{p}." in shown for p in gathering)
        forward, backward, why = _OUTCOMES[kind]
        if scattered and kind in ("colwise", "packed_colwise"):
            forward, backward = "all_gather_matmul", "matmul_reduce_scatter"
        elif scattered and kind == "rowwise":
            forward, backward = "matmul_reduce_scatter", "all_gather_matmul"
        elif sequence and "*" in shown and not why:
            why = "the block around it gathers the sequence first, because not all of it is sharded"
        return LayerReport(shown, 1, style, forward, backward, why)


_OUTCOMES = {
    "colwise": ("local", "matmul_all_reduce", ""),
    "packed_colwise": ("local", "matmul_all_reduce", ""),
    "colwise_gather_output": ("all_gather", "matmul_all_reduce", _AFTERWARDS),
    "colwise_rep": ("all_gather", "matmul_all_reduce", _AFTERWARDS),
    "rowwise": ("matmul_all_reduce", "local", ""),
    "rowwise_split_input": ("matmul_all_reduce", "all_gather", "its input is gathered backward"),
    "rowwise_rep": ("matmul_all_reduce", "all_gather", "its input is gathered backward"),
    "embedding_rowwise": ("all_reduce", "local", _LOOKUP.format("sum")),
    "embedding_colwise": ("all_gather", "local", _LOOKUP.format("gather")),
    "moe_tp_experts": ("all_reduce", "all_reduce", _EXPERTS),
    "replicated_with_grad_allreduce": ("local", "all_reduce", _SINGLE),
    "mla_kv_a_proj": ("local", "all_reduce", _SINGLE),
    "all_reduce": ("all_reduce", "local", "there is no product of weft before the sum"),
    "moe_identity_expert": ("local", "local", ""),
}
"""By style: what runs forward and backward, and why communication is not overlapped."""


def _in_braces(names: list[str]) -> str:
    """Several names as one: {q,k,v}_proj."""
    tail = "_proj" if all(name.endswith("_proj") for name in names) else ""
    return f"{{{','.join(name.removesuffix(tail) for name in names)}}}{tail}"


def _parameter_placement(parameter: Any, style: str) -> Placement:
    kind, _, number = style.partition(":")
    if kind in ("packed_colwise", "packed_rowwise"):
        place = columns if kind == "packed_colwise" else rows
        return place(parameter, False, int(number or 2))
    if kind in ("colwise", "rowwise"):
        return columns(parameter, False) if kind == "colwise" else rows(parameter, False)
    if kind == "replicated_with_grad_allreduce":
        return Replicate()
    raise Unsupported(f"a parameter alone cannot have the style {style!r}; give it to its module")


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or a Conv1D of transformers, whose weight is turned."""
    turned = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return isinstance(module, nn.Linear) or turned


def _out_features(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return module.out_features
    count: int = module.nf  # type: ignore[assignment]
    return count


def _span(size: int, rank: int, world: int) -> tuple[int, int]:
    """The first row of a rank, and the number of its rows, as by `chunk`."""
    most = -(-size // world)
    start = min(rank * most, size)
    return start, min(most, size - start)
