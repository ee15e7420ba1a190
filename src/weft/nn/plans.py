"""Plans of tensor parallelism: which style every layer of a model has.

A plan maps names to styles, e.g. `{"model.layers.*.mlp.up_proj": "colwise"}`. Hugging Face models
bring one (`model.tp_plan`), with the styles below; `*` stands for one part of a name. GPT-2 has
none there, so its plan is here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from weft.errors import Unsupported, nearest

STYLES = {
    "colwise": "the columns of the result are divided",
    "colwise_gather_output": "the columns are divided, and gathered afterwards",
    "colwise_rep": "as colwise_gather_output",
    "packed_colwise": "several layers in one weight, each divided as by colwise",
    "rowwise": "the columns of the input are divided, and the products summed",
    "rowwise_split_input": "as rowwise, of an input that all ranks hold",
    "rowwise_rep": "as rowwise_split_input",
    "packed_rowwise": "several layers in one weight, each divided as by rowwise",
    "embedding_rowwise": "the vocabulary is divided, and the rows summed",
    "embedding_colwise": "the columns of the embedding are divided, and gathered",
    "moe_tp_experts": "every expert is divided, and the results are summed",
    "expert_parallel": "whole experts are divided among the ranks, and their results are summed",
    "replicated_with_grad_allreduce": "whole on every rank; its gradient is summed",
    "mla_kv_a_proj": "whole on every rank; the gradient of its rotary part is summed",
    "all_reduce": "the results of the ranks are summed",
    "moe_identity_expert": "every rank gives its share of the identity",
    "replicate": "whole on every rank",
}
"""The styles of plans, which are those of transformers, and expert_parallel."""

_GPT2 = {
    "h.*.attn.c_attn": "packed_colwise:3",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_OWN = {"gpt2": (_GPT2, {"lm_head": "colwise_gather_output"})}
"""By the type of a model: the plan of its base model, and that of its head."""


def plan_of(model: nn.Module, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """The plan for a model: the caller's, that of the model, or weft's. Raises if there is none,
    or if a name or style of it is not known."""
    found = dict(plan) if plan is not None else _brought(model)
    if not found:
        raise Unsupported(
            f"{type(model).__name__} brings no plan of tensor parallelism (`tp_plan`); give one: "
            'plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        )
    for pattern, style in found.items():
        kind = style.partition(":")[0] if isinstance(style, str) else style
        if not isinstance(style, str | ParallelStyle):
            raise Unsupported(
                f"the style of {pattern!r} is a {type(style).__name__}; give the name of a style "
                "or a ParallelStyle"
            )
        if isinstance(kind, str) and kind not in STYLES:
            raise Unsupported(
                f"there is no style {kind!r} for {pattern!r}{nearest(kind, STYLES)}; the styles "
                f"are {', '.join(STYLES)}"
            )
    if plan is not None:
        _check_used(model, found)
    return found


def style_of(name: str, plan: Mapping[str, Any]) -> Any:
    """The style of a module or parameter, or None."""
    if name in plan:
        return plan[name]
    return next((style for pattern, style in plan.items() if _matches(name, pattern)), None)


def wildcard(name: str) -> str:
    """A name in which `*` stands for numbers, so that equal layers have one name."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _brought(model: nn.Module) -> dict[str, Any]:
    brought = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if brought:
        return dict(brought)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _OWN:
        return {}
    base, head = _OWN[kind]
    prefix = str(getattr(model, "base_model_prefix", ""))
    inner = hasattr(model, prefix) if prefix else False
    names = {f"{prefix}.{name}" if inner else name: style for name, style in base.items()}
    return {**names, **{name: style for name, style in head.items() if hasattr(model, name)}}


def _check_used(model: nn.Module, plan: Mapping[str, Any]) -> None:
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    for pattern in plan:
        if not any(_matches(name, pattern) for name in names):
            known = sorted({wildcard(name) for name in names})
            raise Unsupported(
                f"the plan names {pattern!r}, which the model has not{nearest(pattern, known)}"
            )


def _matches(name: str, pattern: str) -> bool:
    if pattern == name:
        return True
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
