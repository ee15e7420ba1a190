"""Everything that parses what a user, a file or a peer wrote: it gives a value, or refuses in one
sentence. There is no other way out, whatever is in the text."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as some

import weft.machine
import weft.models.workloads
from weft import Error, Schedule
from weft.cli.asked import sizes_of
from weft.fabric import Link, deadlines
from weft.fabric.group.headers import read_header
from weft.fabric.proposal import Proposal, check_same
from weft.machine import load
from weft.machine.cluster import load_cluster
from weft.models.workloads import load_workload
from weft.select import store
from weft.study.layers.huggingface import Run, read_config
from weft.study.layers.listing import read_layers
from weft.study.scenarios import from_csv

ROOT = Path(__file__).parents[2]
MACHINES = Path(weft.machine.__file__).parent
WORKLOADS = Path(weft.models.workloads.__file__).parent

NASTY = (
    *("", "0", "-1", "1e999", "nan", "inf", "9" * 400, "9" * 5000, "1.5", "true", '""', "''", "[]"),
    *("{}", "[" * 2000, "{a=" * 2000, "\x00", "\ufeff", "\ud7ff\n", "é", "\n", '"\\u0000"', "'''"),
    *("null", "[[1]]", '{"a": 1}', "x" * 200_000, ",", ":", "@", "#", "1979-05-27T07:32:00Z"),
)


@some.composite
def mutated(draw: Callable, text: str) -> str:
    """A text with a few changes: parts taken out, doubled, or replaced by something nasty."""
    for _ in range(draw(some.integers(1, 3))):
        begin = draw(some.integers(0, len(text)))
        end = min(len(text), begin + draw(some.integers(0, 40)))
        put = draw(
            some.sampled_from(NASTY) | some.text(max_size=8) | some.just(2 * text[begin:end])
        )
        text = text[:begin] + put + text[end:]
    return text


@some.composite
def revalued(draw: Callable, text: str) -> str:
    """A TOML file in which one key has another value, so that what reads the tables is met."""
    lines = text.splitlines()
    keys = [n for n, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    at = draw(some.sampled_from(keys))
    name = lines[at].split("=", 1)[0]
    lines[at] = f"{name}= {draw(some.sampled_from(NASTY) | some.text(max_size=8))}"
    return "\n".join(lines)


def refuses(function: Callable[[], object]) -> None:
    """That a function gives a value or refuses in one sentence."""
    try:
        function()
    except Error as error:
        said = str(error)
        assert said
        assert "\n" not in said, said
        assert len(said) < 5000, said[:200]


def from_text(tmp: Path, suffix: str, text: str, read: Callable[[str], object]) -> None:
    file = tmp / f"fuzzed{suffix}"
    file.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
    refuses(lambda: read(str(file)))


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# -- names, links, sizes ---------------------------------------------------------------------------

NAMES = some.from_regex(r"[a-z0-9-]{0,30}(:[0-9]{0,12})?(@[a-z]{0,8})?", fullmatch=True)


@given(some.text() | NAMES | mutated("hetero-unfused-1d:16@cores") | mutated("adaptive@dma"))
@example("x" * 200_000)
@example("serial:9999999999999999999")
def test_schedules(text):
    def parse() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of an old name
            found = Schedule.parse(text)
            assert Schedule.parse(found.name) == found

    refuses(parse)


@given(some.text() | mutated("0.1GB/s") | mutated("memory"))
@example("1e400GB/s")
@example("9" * 400 + "GB/s")
def test_links(text):
    refuses(lambda: Link.parse(text))


@given(some.text() | mutated("64KiB,256MiB"))
def test_sizes(text):
    refuses(lambda: sizes_of(text))


@given(some.text() | some.floats() | some.integers() | some.none() | mutated("60"))
def test_deadlines(value):
    refuses(lambda: deadlines.nanoseconds(deadlines.seconds_of(value, "deadline")))


# -- files -----------------------------------------------------------------------------------------

TOMLS = {
    "machine": (MACHINES / "h100.toml", load),
    "cluster": (min(MACHINES.glob("clusters/*.toml")), load_cluster),
    "layers": (ROOT / "examples" / "layers.toml", read_layers),
    "workload": (WORKLOADS / "dlrm.toml", lambda path: load_workload("dlrm", path)),
}


@pytest.mark.parametrize("kind", TOMLS)
def test_toml_files(kind, tmp):
    file, read = TOMLS[kind]
    whole = file.read_text(encoding="utf-8")
    read(str(file))

    @given(revalued(whole) | mutated(whole) | some.text())
    def fuzz(text):
        from_text(tmp, ".toml", text, read)

    fuzz()


@given(text=mutated("id,m,n,k,dtype\na,64,64,64,bfloat16\nb,1,2,3,float32\n") | some.text())
@example(text="m,n,k\n1,2," + "9" * 200_000)
@example(text='m,n,k\n1,2,"3\n')
def test_csv_files(text, tmp):
    from_text(tmp, ".csv", text, from_csv)


CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
)


@given(text=mutated(CONFIG) | some.text())
@example(text="[" * 100_000)
@example(text='{"hidden_size": ' + "9" * 5000 + "}")
def test_configs_of_models(text, tmp):
    from_text(tmp, ".json", text, lambda path: read_config(path, Run()))


ASKED = store.Question("here", "all_gather_matmul", "float32", 2, "memory", 64, 64, 64, "0")
KEPT = {
    "question": asdict(ASKED),
    "schedule": "adaptive@dma",
    "seconds": 1.0,
    "serial_seconds": 2.0,
}


@given(
    text=mutated(json.dumps({**KEPT, "digest": store._digest(KEPT)}))
    | some.text()
    | some.dictionaries(some.text(), some.integers() | some.text()).map(json.dumps)
)
@example(text="[" * 100_000)
@example(text='{"digest": "x"}')
def test_tuned_results(text, tmp):
    """What does not hold is set aside with a warning, and the call goes on without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp))
        path = ASKED.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = store.find(ASKED)
        assert found is None or isinstance(found, store.Answer)
        for aside in path.parent.glob("*.corrupt"):
            aside.unlink()


# -- what peers write ------------------------------------------------------------------------------

HEADER = Proposal("all_gather_matmul", (("K", 4), ("dtype", "float32")), (("rows", 3),)).blob
JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(), inner, max_size=3),
)


@given(
    some.binary()
    | JSON.map(lambda value: json.dumps(value).encode())
    | mutated(HEADER.decode()).map(lambda text: text.encode(errors="surrogatepass"))
)
@example(b"[" * 3840)
@example(json.dumps(["a", [["x", 1]], [], ""]).encode())
def test_headers_of_calls(blob):
    """A header is a proposal or no header; proposals that differ are a `Mismatch`."""
    try:
        theirs = Proposal.read(blob)
    except ValueError:
        return
    refuses(lambda: check_same([Proposal.read(HEADER), theirs], 7))


@given(some.binary(max_size=4000))
@example(b"\xff" * 28)
def test_headers_over_the_network(data):
    """What a message says about its size is compared with the message."""
    header = read_header(np.frombuffer(data, np.uint8))
    assert header is None or len(header[1].blob) <= len(data)
