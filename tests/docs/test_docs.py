"""The documents tell the truth: every python block runs as printed, the reference is in step with
the docstrings, and every link leads somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from ranks import run_script

import weft

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

SAYS = {
    "overlapped.py": "adaptive@direct",
    "seen.py": "adaptive: waited",
    "trained.py": "torch.Size([64, 128]) torch.Size([64, 128]) torch.Size([128, 256])",
    "compiled.py": "not overlapped: 1",
    "own_backend.py": "all_gather_matmul",
    "dynamic.py": "2 graphs, each with matmul_all_reduce",
    "hugging_face.py": "8 sharded layers are overlapped, 2 are not.",
    "your_plan.py": "4 sharded layers are overlapped, 0 are not.",
    "sequence.py": "matmul_reduce_scatter",
    "inference.py": "greedy, static cache, beams: alike",
    "compiled_generate.py": "no new graph for other lengths",
    "fused.py": "pooled (2, 6) 12.0",
    "collected.py": "announcement (up to 32 KiB travel with the announcement",
    "backend.py": "weft: [1.0, 1.0, 1.0] from rank 1",
    "beside.py": "dma {'dma': 128}",
    "row_parallel.py": "1 in-kernel",
    "which_path.py": "asked for adaptive@dma, ran adaptive@dma: asked for",
    "expert_block.py": "experts of this rank: 4",
    "summarized.py": "mlp.0",
    "faults.py": "refused by rank 1: w has 16 rows, but x_shard has 12 columns",
}
"""What rank 0 is to print, among other things."""


def blocks():
    """Every python block, by the name in its first line."""
    found = {}
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
            name = re.match(r"# (\w+\.py)", code)
            assert name is not None, f"a block of {page.name} does not name its file"
            assert name[1] not in found
            found[name[1]] = code
    return found


BLOCKS = blocks()


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_runs(ranks, name):
    # Scripts leave groups and settings behind: they have ranks of their own. Those that load loom
    # leave an accelerator behind, which other libraries would then use by default.
    kind = "docs with loom" if "weft.loom" in BLOCKS[name] else "docs"
    outputs = ranks(2, WEFT_TESTS=kind).run(run_script, BLOCKS[name], name)
    assert SAYS.get(name, "") in outputs[0]


def test_no_expectation_is_stale():
    assert set(SAYS) <= set(BLOCKS)
    assert len(BLOCKS) >= 15


def test_every_variable_is_documented():
    sources = (path.read_text() for path in (ROOT / "src/weft").rglob("*.py"))
    read = {name for text in sources for name in re.findall(r'"(WEFT_[A-Z_]+)"', text)}
    page = (ROOT / "docs/how-to/environment.md").read_text()
    assert read == set(re.findall(r"^\| `(WEFT_[A-Z_]+)` \|", page, re.MULTILINE))


def test_the_reference_is_in_step():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/generate/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs/reference.md").read_text()
    assert written == module.render(), "run: python docs/generate/reference.py"


@pytest.mark.parametrize("name", sorted(set(weft.__all__) - {"nn"}))
def test_everything_public_has_a_docstring(name):
    assert getattr(weft, name).__doc__


@pytest.mark.parametrize("page", NAMES)
def test_every_link_leads_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def reasons():
    """The text of every reason that the compile pass can give, its longest fixed piece."""
    for name in ("reduce_patterns", "gather_patterns", "rewrite", "compiling", "graph_collectives"):
        tree = ast.parse((ROOT / f"src/weft/nn/{name}.py").read_text())
        raised = {id(n) for r in ast.walk(tree) if isinstance(r, ast.Raise) for n in ast.walk(r)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant | ast.JoinedStr) or id(node) in raised:
                continue
            pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
            fixed = [p.value for p in pieces if isinstance(p, ast.Constant)]
            text = max((p for p in fixed if isinstance(p, str)), key=len, default="").strip(" :;,")
            # A reason is a sentence in lower case; docstrings begin with a capital, and the schemas
            # of operators have arrows.
            sentence = len(text.split()) >= 4 and text[0].islower()
            if sentence and "\n" not in text and "->" not in text:
                yield text


def test_every_reason_of_the_compile_pass_is_explained():
    page = (ROOT / "docs/how-to/compile.md").read_text()
    found = set(reasons())
    assert len(found) >= 18
    assert [reason for reason in found if reason not in page] == []
