"""`weft.compile` and its graph pass, which replaces pairs of a collective and a product by weft's
operators.

The pass takes graphs of aten operations with functional collectives, as AOTAutograd makes them: of
the forward, of the backward, or of both. It sees through views, transposes, chunks and casts,
because it follows where elements are (layout.py) instead of matching a fixed pattern.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from weft.errors import Unsupported
from weft.nn import gather_patterns, graph_collectives, reduce_patterns
from weft.nn.graph_sizes import NoSize, learn
from weft.nn.report import NearMiss, Report
from weft.nn.rewrite import drop_copies, sort, split_products

BACKENDS = ("eager", "inductor")
_SUMS = reduce_patterns.COLLECTIVES - gather_patterns.COLLECTIVES


def overlap_pass(module: GraphModule | Graph, schedule: str = "auto") -> Report:
    """Replaces pairs of a collective and a product in a graph, in place, and reports every pair.

    Results stay the same; each replaced pair runs as one overlapped operator.

    Args:
        module: an FX graph (module) of aten operations whose nodes carry fake values in
            `meta["val"]`, as AOTAutograd gives to its compilers.
        schedule: the schedule of the new operators.
    """
    start = time.perf_counter()
    graph = module.graph if isinstance(module, GraphModule) else module
    report = Report()
    graph.eliminate_dead_code()
    learn(graph, _worlds(graph))
    drop_copies(graph)
    split_products(graph)
    for node in list(graph.nodes):
        if node.target in _SUMS:
            _try([reduce_patterns], graph, node, schedule, report)
    for node in list(graph.nodes):
        if node.target in gather_patterns.COLLECTIVES:
            # Products after an all-to-all are tried first, then those before it.
            both = node.target in reduce_patterns.COLLECTIVES
            patterns = [gather_patterns, reduce_patterns] if both else [gather_patterns]
            _try(patterns, graph, node, schedule, report)
    graph_collectives.swap(graph, report)
    sort(graph)
    graph.eliminate_dead_code()
    graph.lint()
    if isinstance(module, GraphModule):
        module.recompile()
    report.seconds = time.perf_counter() - start
    return report


def _worlds(graph: Graph) -> set[int]:
    """The numbers of ranks of the collectives in a graph."""
    sized = {gather_patterns.ALL_GATHER: 1, reduce_patterns.REDUCE_SCATTER: 2}
    found = {node.args[sized[node.target]] for node in graph.nodes if node.target in sized}
    return {world for world in found if isinstance(world, int)}


def _try(patterns: list[Any], graph: Graph, node: Node, schedule: str, report: Report) -> None:
    """Replaces a collective and its products by the first pattern that can, or reports why none
    can."""
    problems = []
    for pattern in patterns:
        try:
            problem = pattern.replace(graph, node, schedule, report)
        except NoSize as missing:
            problem = f"no node of the graph has the size {missing}, which the new operator needs"
        if problem is None:
            return
        problems.append(NearMiss(node.name, problem))
    report.near_misses += problems


def compile(
    model: Callable[..., Any],
    *,
    schedule: str = "auto",
    backend: str = "eager",
    reports: list[Report] | None = None,
    **options: Any,
) -> Any:
    """Compiles a model so that its functional collectives (DTensor's are functional) overlap with
    the products next to them, in the forward and in the backward.

    Equals::

        torch.compile(model)

    Args:
        model: a module or function.
        schedule: a name such as "adaptive@dma", or "auto".
        backend: "eager" runs the graphs operator by operator; "inductor" also compiles the other
            operators and needs a C++ compiler.
        reports: a list to which the `Report` of every compiled graph is appended.
        options: further arguments of `torch.compile`, e.g. fullgraph=True.
    """
    if backend not in BACKENDS:
        raise Unsupported(
            f"there is no backend {backend!r}; the backends are {', '.join(BACKENDS)}"
        )
    chosen = _eager(schedule, reports) if backend == "eager" else _inductor(schedule, reports)
    return torch.compile(model, backend=chosen, **options)


def _eager(schedule: str, reports: list[Report] | None) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compiler(module: GraphModule, inputs: Any) -> Any:
        report = overlap_pass(module, schedule)
        if reports is not None:
            reports.append(report)
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def _inductor(schedule: str, reports: list[Report] | None) -> Any:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            report = overlap_pass(graph, schedule)
            if reports is not None:
                reports.append(report)

        def uuid(self) -> Any:
            return None  # a graph from a cache would have no report

    def backend(module: GraphModule, inputs: Any) -> Any:
        # Passed as an argument, the pass also applies to the backward, which is compiled later.
        patches = {"post_grad_custom_pre_pass": Pass(), "fx_graph_cache": False}
        return compile_fx(module, inputs, config_patches=patches)

    return backend
