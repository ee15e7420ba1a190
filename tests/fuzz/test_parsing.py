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
import torch
from hypothesis import example, given
from hypothesis import strategies as some

import weft.machine
import weft.models.workloads
from weft import Error, Schedule
from weft.cli.asked import size_of, sizes_of
from weft.cli.explore_cluster import nodes_of
from weft.fabric import Link, deadlines
from weft.fabric.group.headers import HEADER_BYTES, read_header, write_header
from weft.fabric.group.transfers import NetworkFlight, NetworkProgram
from weft.fabric.group.wires import _Inbox
from weft.fabric.host.opening import heap_span
from weft.fabric.outcomes import CORRUPT, OK, PEER_LEFT
from weft.fabric.proposal import Proposal, check_same
from weft.fabric.reach import Transfer
from weft.files import check_target
from weft.machine import load
from weft.machine.cluster import load_cluster
from weft.machine.measurements import measurements
from weft.measure.link_spec import LinkSpec
from weft.models.workloads import load_workload
from weft.plan.tasks import Region
from weft.select import store
from weft.simulate.cluster.lowering import Algorithm
from weft.strategy import Strategy
from weft.studio import presets
from weft.studio.live_case import LiveCase
from weft.studio.state import State
from weft.study.layers.huggingface import PARALLELISMS, STEPS, Run, read_config
from weft.study.layers.listing import read_layers
from weft.study.scenarios import from_csv

ROOT = Path(__file__).parents[2]
MACHINES = Path(weft.machine.__file__).parent
WORKLOADS = Path(weft.models.workloads.__file__).parent

NASTY = (
    *("", "0", "-1", "1e999", "nan", "inf", "9" * 400, "9" * 5000, "1.5", "true", '""', "''", "[]"),
    *("{}", "[" * 2000, "{a=" * 2000, "\x00", "\ufeff", "\ud7ff\n", "é", "\n", '"\\u0000"', "'''"),
    *("null", "[[1]]", '{"a": 1}', "x" * 200_000, ",", ":", "@", "#", "1979-05-27T07:32:00Z"),
    *(f'"{"x" * 300}"', f'"{"x" * 300}.toml"'),
)


NAMES_OF_KEYS = ('""', '"\\n"', '"\\u001b[2J"', "'x'", "a.b", "dtype")


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


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(), inner, max_size=3),
)


@some.composite
def revalued(draw: Callable, text: str) -> str:
    """A TOML file in which one key has another value, and perhaps another name, so that what reads
    the tables is met."""
    lines = text.splitlines()
    keys = [n for n, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    at = draw(some.sampled_from(keys))
    name = draw(some.just(lines[at].split("=", 1)[0]) | some.sampled_from(NAMES_OF_KEYS))
    lines[at] = f"{name}= {draw(some.sampled_from(NASTY) | some.text(max_size=8))}"
    return "\n".join(lines)


def refuses(function: Callable[[], object]) -> None:
    """That a function gives a value or refuses in one sentence."""
    try:
        function()
    except Error as error:
        said = str(error)
        assert said
        assert said.isprintable(), said
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
    refuses(lambda: size_of(text))


@given(some.text() | mutated("2x") | mutated("balanced"))
def test_paces_of_links(text):
    refuses(lambda: LinkSpec.parse(text))


@given(some.text() | mutated("dma+trimmed:8"))
def test_strategies(text):
    refuses(lambda: Strategy.parse(text))


@given(some.text() | mutated("hierarchical:direct+ring"))
def test_algorithms(text):
    refuses(lambda: Algorithm.parse(text))


CLUSTER = load_cluster(str(min(MACHINES.glob("clusters/*.toml"))))


@given(some.text() | mutated("1,3..8,1..128"))
@example("1.." + "9" * 4000)
def test_numbers_of_nodes(text):
    refuses(lambda: nodes_of(text, CLUSTER))


@given(mutated("64GiB") | some.text(some.characters(exclude_characters="\x00")))
@example("9" * 400)
def test_sizes_of_heaps(text):
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("WEFT_HEAP", text)
        except (ValueError, UnicodeEncodeError):  # it can be in no environment
            return
        refuses(heap_span)


@given(some.text() | some.floats() | some.integers() | some.none() | mutated("60"))
def test_deadlines(value):
    refuses(lambda: deadlines.nanoseconds(deadlines.seconds_of(value, "deadline")))


# -- files -----------------------------------------------------------------------------------------

TOMLS = {
    "machine": (MACHINES / "h100.toml", load),
    "server": (min(MACHINES.glob("servers/*.toml")), load),
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


@pytest.mark.parametrize(
    "read",
    [load, load_cluster, lambda path: load_workload("dlrm", path), measurements, check_target],
)
@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".toml", "x" * 300 + "/y", "x\x00"])
def test_names_that_no_file_can_have(read, name):
    refuses(lambda: read(name))


@given(text=mutated("id,m,n,k,dtype\na,64,64,64,bfloat16\nb,1,2,3,float32\n") | some.text())
@example(text="m,n,k\n1,2," + "9" * 200_000)
@example(text='m,n,k\n1,2,"3\n')
def test_csv_files(text, tmp):
    from_text(tmp, ".csv", text, from_csv)


SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "sliding_window": 4096,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0], "moe_layer_freq": 2}
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 4,
}
OPTIONAL = {
    "torch_dtype": "bfloat16",
    "dtype": "float16",
    "head_dim": 128,
    "q_lora_rank": 1536,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window_pattern": 6,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 16384,
    "shared_expert_intermediate_size": 1024,
    "decoder_sparse_step": 1,
    "text_config": {"hidden_size": 2048},
    "_name_or_path": "a model",
    "ffn_config": {"moe_num_experts": 16, "ffn_hidden_size": 3584},
}
CONFIG = json.dumps({"model_type": "llama", **SIZES})
WHOLE = (
    {"model_type": "llama", **SIZES},
    {"model_type": "gemma3_text", **SIZES},
    {"model_type": "qwen2_moe", **SIZES, **EXPERTS},
    {"model_type": "deepseek_v3", **SIZES, **LATENT},
    {"model_type": "mpt", "n_embd": 4096, "n_layer": 4, "n_head": 32, "expansion_ratio": 4},
    {"model_type": "falcon", **SIZES, "multi_query": True, "new_decoder_architecture": False},
)
KEYS = sorted(set().union(*WHOLE, OPTIONAL))
COUNTS = some.sampled_from([0, 1, -1, 2**32, 2**63, 10**400, -(10**400)])


@some.composite
def configs(draw: Callable) -> str:
    """A model's config in which some keys have another value, of any kind."""
    config = {**draw(some.sampled_from(WHOLE)), **draw(some.sampled_from(({}, OPTIONAL)))}
    config |= draw(some.dictionaries(some.sampled_from(KEYS), COUNTS | JSON, max_size=3))
    return json.dumps(config)


CONFIGS = configs() | some.sampled_from([json.dumps(config) for config in WHOLE]).flatmap(mutated)


RUNS = some.builds(
    Run,
    batch=some.sampled_from([1, 3, 2**32]),
    sequence=some.sampled_from([1, 17, 8192, 2**32]),
    world=some.sampled_from([1, 3, 8, 4096]),
    parallelism=some.sampled_from(PARALLELISMS),
    step=some.sampled_from(STEPS),
)


@given(text=CONFIGS | some.text(), run=RUNS)
@example(text=json.dumps({**SIZES, "num_key_value_heads": 0}), run=Run())
@example(text=json.dumps({**SIZES, "sliding_window": -(10**400)}), run=Run())
@example(text=json.dumps({**SIZES, "dtype": {"text_config": "bfloat16"}}), run=Run())
@example(text="[" * 100_000, run=Run())
@example(text='{"hidden_size": ' + "9" * 5000 + "}", run=Run())
@example(text=CONFIG.replace("4096", "9" * 500), run=Run())
@example(text=json.dumps({**SIZES, **EXPERTS, "num_hidden_layers": 10**15}), run=Run())
@example(text=json.dumps({**SIZES, **EXPERTS, "mlp_only_layers": ["first"]}), run=Run())
@example(text=json.dumps({**SIZES, **EXPERTS, "mlp_only_layers": 3}), run=Run())
def test_configs_of_models(text, run, tmp):
    from_text(tmp, ".json", text, lambda path: read_config(path, run))


@given(
    text=CONFIGS.map(lambda text: text.encode(errors="surrogatepass")) | some.binary(),
    world=some.integers(0, 9999),
)
@example(text=b"[" * 100_000, world=8)
@example(text=CONFIG.encode(), world=0)
def test_configs_that_the_studio_is_given(text, world):
    refuses(lambda: presets.read_config(text, world))


VALUES = some.sampled_from(NASTY) | some.text(max_size=70) | some.integers().map(str)
QUERY = some.dictionaries(
    some.sampled_from(sorted(State.__dataclass_fields__)) | some.text(max_size=9),
    VALUES,
    max_size=4,
)


@given(
    QUERY, some.fixed_dictionaries({}, optional=dict.fromkeys(("where", "pace", "rounds"), VALUES))
)
@example({"m": "9" * 64}, {})
@example({"pinned": "adaptive:999999999999"}, {"rounds": "٣"})
def test_links_to_the_studio(query, live):
    refuses(lambda: State.from_query(query).to_query())
    refuses(lambda: LiveCase.from_query(query | live).to_query())


ASKED = store.Question("here", 1, "all_gather_matmul", "float32", 2, "memory", 64, 64, 64, "0")
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


MESSAGES = some.lists(
    some.tuples(some.integers(0, 2**64 - 1), some.binary(max_size=200), some.binary(max_size=3000)),
    max_size=3,
)


@given(MESSAGES, some.binary(max_size=100), some.lists(some.integers(1, 500), min_size=1))
@example([(0, b"", b"")], b"", [7])
@example([], b"\xff" * 28, [1])
def test_what_comes_over_a_wire_in_pieces(messages, rest, pieces):
    """Messages come as they were sent, however the network cuts them. What is no header is found
    out before there is room for it, and nothing is read beyond."""
    data = b"".join(
        write_header(call, 5, blob, 9, len(payload)) + payload for call, blob, payload in messages
    )
    stream, inbox, found, at, cut = data + rest, _Inbox(), [], 0, 0
    while at < len(stream) and CORRUPT not in found:
        room = inbox.room
        assert 0 < len(room) <= HEADER_BYTES
        count = min(len(room), pieces[cut % len(pieces)], len(stream) - at)
        room[:count] = stream[at : at + count]
        at, cut = at + count, cut + 1
        message = inbox.take(count)
        if message is not None:
            found.append(message)
            if len(found) <= len(messages):
                call, blob, payload = messages[len(found) - 1]
                if call == 0:
                    assert message == PEER_LEFT
                else:
                    assert (message[0], message[1].blob) == (call, blob)
                    assert message[1].payload.tobytes() == payload
    assert len(found) >= len(messages)


class _Silent:
    """In place of the native fabric: nobody waits for the bytes."""

    def signal(self, call: int, counter: int, rings: object) -> None: ...


@given(
    some.lists(some.tuples(some.integers(0, 3), some.integers(1, 3)), min_size=1, max_size=3),
    some.binary(max_size=64),
    some.booleans(),
)
def test_bytes_that_came_with_a_header(shapes, data, fits):
    """As many as the plan says, or the peer is at fault."""
    tensors = [torch.zeros(shape, dtype=torch.float32) for shape in shapes]
    transfers = tuple(
        Transfer(number, 1, False, number, Region(0, "y", 0, rows, 0, columns), (), number)
        for number, (rows, columns) in enumerate(shapes)
    )
    wanted = sum(tensor.nbytes for tensor in tensors)
    if fits:
        data = (data + bytes(wanted))[:wanted]
    flight = NetworkFlight(
        _Silent(), None, NetworkProgram(None, transfers), 1, 0, tensors, [], [], False
    )
    flight._unpack({1: np.frombuffer(data, np.uint8)})
    assert flight.outcome == ((OK, -1) if len(data) == wanted else (CORRUPT, 1))
    if len(data) == wanted:
        assert b"".join(tensor.numpy().tobytes() for tensor in tensors) == data
