"""Types of the native module; see native/bindings.cpp. One long file, because a module has one
stub."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

VERSION: str
MAX_WORLD: int
MAX_SLOTS: int
MAX_COUNTERS: int
MAX_BLOB: int

POINTS: tuple[str, ...]

def set_trap(point: int, times: int, signal: int) -> None: ...
def now_ns() -> int: ...
def is_dying(pid: int) -> bool: ...
def own_now_ns() -> int: ...
def slept(began: int, due: int) -> None: ...
def create_heap(world: int, span: int) -> int: ...

class Block:
    offset: int
    size: int
    pointer: int
    def array(self) -> npt.NDArray[np.uint8]: ...

End = tuple[int, int, int, int]
Outcome = tuple[int, int]

class Program:
    def __init__(self) -> None: ...
    def add(
        self,
        lane: int,
        task: int,
        holds_core: bool,
        source: End,
        target: End,
        rows: int,
        row_bytes: int,
        waits: Sequence[tuple[int, int]],
        counter: int,
        rings: Sequence[int],
    ) -> None: ...

class Call:
    spans: list[tuple[int, int, int]]

class Fabric:
    allocated: int
    def __init__(
        self,
        fd: int,
        rank: int,
        world: int,
        span: int,
        spin_ns: int,
        engine_spin_ns: int,
        cores: int = 1,
    ) -> None: ...
    def leave(self) -> None: ...
    def watch(self, rank: int, pidfd: int, pid: int) -> None: ...
    def set_link(self, bandwidth: float, latency_ns: int, topology: int) -> None: ...
    def allocate(self, size: int) -> Block: ...
    def offset_of(self, pointer: int) -> int: ...
    def stage(self, block: Block, source: int, size: int) -> None: ...
    def enter(self, call: int, signature: int, offsets: Sequence[int], blob: bytes) -> None: ...
    def agree(self, call: int, signatures: Sequence[int], deadline: int) -> Outcome: ...
    def header(self, call: int, rank: int) -> bytes: ...
    def entered(self, rank: int) -> int: ...
    def peer_array(self, call: int, rank: int, slot: int, size: int) -> npt.NDArray[np.uint8]: ...
    def peer_pointer(self, call: int, rank: int, slot: int) -> int: ...
    def launch(
        self,
        program: Program,
        number: int,
        deadline: int,
        pointers: Sequence[int],
        signatures: Sequence[int],
        record: bool,
        small: bool = False,
    ) -> Call: ...
    def is_small(self, program: Program) -> bool: ...
    def cancel(self, call: Call) -> None: ...
    def finish(self, call: Call) -> Outcome: ...
    def outcome(self, call: Call) -> Outcome: ...
    def wait(self, call: Call, rank: int, counter: int) -> Outcome: ...
    def wait_timed(self, call: Call, rank: int, counter: int) -> int: ...
    def doorbell(self) -> int: ...
    def wait_doorbell(self, call: Call, seen: int) -> Outcome: ...
    def reached(self, call: int, counters: Sequence[tuple[int, int]]) -> list[bool]: ...
    def counters(self) -> npt.NDArray[np.int64]: ...
    def signal(self, call: int, counter: int, rings: Sequence[int]) -> int: ...
    def reserve(self, source: int, target: int, bytes: int, since: int) -> int: ...
    def hold(self, call: int, until: int, deadline: int) -> Outcome: ...
    def done(self, call: int) -> Outcome: ...
    def fail(self, call: int, why: int) -> None: ...
    def failed(self, rank: int) -> int: ...
    def wait_released(self, call: int, deadline: int) -> Outcome: ...

def has_torch_product() -> bool: ...

Area = tuple[int, int, int, int, int, int, int]

class Lane:
    def __init__(self, dtype: int, item: int, one_launch: bool) -> None: ...
    def add(
        self,
        id: int,
        duty: int,
        a: Sequence[Area],
        b: Sequence[Area],
        c: Sequence[Area],
        accumulate: bool,
        transposed: bool,
        waits: Sequence[tuple[int, int]],
        remote: bool,
        counter: int,
        rings: Sequence[int],
        merge: int,
        needs: Sequence[int],
    ) -> None: ...
    def add_stretch(self, first: int, count: int, loose: bool) -> None: ...
    def next_run(self, ready: Sequence[int]) -> list[int]: ...

class LaneRun:
    at: int
    spans: list[tuple[list[int], int, int]]
    def __init__(
        self, fabric: Fabric, lane: Lane, copies: Call, buffers: list[torch.Tensor]
    ) -> None: ...
    def go(self) -> Outcome: ...

class LaneCall:
    at: int
    copies: Call | None
    def __init__(
        self,
        fabric: Fabric,
        lane: Lane,
        copies: Program,
        signature: int,
        blob: bytes,
        signatures: Sequence[int],
    ) -> None: ...
    def start(
        self, number: int, patience: int, buffers: list[torch.Tensor], offsets: Sequence[int]
    ) -> Outcome: ...
    def go(self) -> Outcome: ...

class Job:
    done: bool
    outcome: Outcome
    number: int
    words: str
    marks: list[tuple[int, int, int, int, int]]

class Facts:
    kind: int
    dtype: int
    reduction: int
    holds_core: bool
    number: int
    item: int
    bytes_in: int
    bytes_out: int
    came: list[int]
    chunks: int
    chunk_bytes: int
    started: int
    ended: int

SMALL_BYTES: int
LEAST_CHUNK_BYTES: int
MOST_CHUNK_BYTES: int
STREAM_BYTES: int
STORE_TRIALS: int

def learn_tensors(type: type, parameter: type) -> bool: ...
def layouts_of(arguments: Sequence[object], graph: bool) -> bytes | None: ...
def watch(
    records: Callable[[], bool],
    modes: Sequence[Callable[[], bool]],
    states: Sequence[tuple[dict[str, object], str, object]],
    groups: object,
) -> None: ...
def again(group: object, arguments: tuple[object, ...]) -> torch.Tensor | None: ...

class KnownCalls:
    def __init__(self, fabric: object, group: object) -> None: ...
    def remember(
        self,
        arguments: tuple[object, ...],
        graph: bool,
        call: SerialCall,
        block: object,
        between: torch.Tensor,
        make: Callable[[], torch.Tensor],
        holds: Callable[[], bool] | None,
        ended: Callable[[float], None],
        otherwise: Callable[..., torch.Tensor],
        break_off: Callable[[int, BaseException], None],
    ) -> None: ...
    def forget(self) -> None: ...

def can_reduce(dtype: int, reduction: int) -> bool: ...

class Exchange:
    def __init__(
        self,
        kind: int,
        dtype: int,
        item: int,
        holds_core: bool,
        uneven: bool,
        moves: bool,
        sizes: Sequence[int],
        given: Sequence[int],
        taken: Sequence[int],
        expected: Sequence[int],
    ) -> None: ...
    def start(
        self,
        channel: Channel,
        call: int,
        patience: int,
        source: int,
        target: int,
        record: bool,
    ) -> Job | None: ...

def serial_product(dtype: int, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None: ...

class SerialCall:
    def __init__(
        self,
        fabric: Fabric,
        channel: Channel,
        exchange: Exchange,
        gathers: bool,
        signature: int,
        blob: bytes,
    ) -> None: ...
    def start(
        self,
        number: int,
        patience: int,
        x: torch.Tensor,
        between: torch.Tensor,
        weights: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> Outcome: ...
    def go(self) -> Outcome: ...

class Channel:
    def __init__(
        self, fabric: Fabric, spin_ns: int, crowded: bool, for_calls: bool = False
    ) -> None: ...
    def quick(
        self,
        kind: int,
        x: object,
        out: object,
        reduction: int,
        root: int,
        patience: float,
        /,
    ) -> Job | bool: ...
    def last(self) -> Facts: ...
    def tune(
        self,
        small: int,
        least_chunk: int,
        most_chunk: int,
        stream: int,
        past: int,
        /,
    ) -> None: ...
    def alike(
        self,
        kind: int,
        dtype: int,
        item: int,
        reduction: int,
        root: int,
        holds_core: bool,
        patience: int,
        source: int,
        target: int,
        num_bytes: int,
        background: bool,
        record: bool,
        /,
    ) -> Job | None: ...
    def various(
        self,
        kind: int,
        dtype: int,
        item: int,
        reduction: int,
        root: int,
        holds_core: bool,
        patience: int,
        uneven: bool,
        sizes: Sequence[int],
        in_at: Sequence[int],
        in_sizes: Sequence[int],
        out_at: Sequence[int],
        out_sizes: Sequence[int],
        background: bool,
        record: bool,
        /,
    ) -> Job: ...
    def refuse(self, words: str, patience: int, background: bool, /) -> Job: ...
    def wait(self, job: Job, until: int, /) -> Outcome: ...
    def withdraw(self, job: Job, /) -> bool: ...
    def abort(self) -> None: ...
    def late(self, job: Job, /) -> list[int]: ...
    def why_failed(self, rank: int, /) -> int | None: ...

class Message:
    done: bool
    source: int
    total: int

class Messages:
    def __init__(self, fabric: Fabric, spin_ns: int, crowded: bool) -> None: ...
    def start(
        self,
        sends: bool,
        peer: int,
        tag: int,
        data: int,
        num_bytes: int,
        patience: int,
        background: bool,
        /,
    ) -> Message: ...
    def wait(self, message: Message, until: int, /) -> Outcome: ...
    def abort(self) -> None: ...

# Kernels that communicate by themselves; see native/bind_fused.cpp.

Piece = tuple[int, int, int, int, End]
Waits = Sequence[tuple[int, int]]

def kernel_names() -> list[str]: ...
def multiply(
    x: int,
    rows: int,
    w: int,
    type: int,
    transposed: bool,
    pitch: int,
    k: int,
    scale: int,
    columns: int,
    out: int,
    threads: int = 1,
    kernels: str = "",
) -> None: ...
def has_team() -> bool: ...
def num_process_cores() -> int: ...

class Bags:
    def check(self) -> tuple[int, int, int]: ...
    def pool(
        self,
        first: int,
        bags: int,
        column: int,
        columns: int,
        target: int,
        pitch: int,
        threads: int = 1,
        kernels: str = "",
    ) -> None: ...
    def spread(self, table: int, bags: int, pitch: int, target: int, threads: int = 1) -> None: ...

def bags_of(
    tables: list[torch.Tensor],
    indices: list[torch.Tensor],
    offsets: list[torch.Tensor],
    weights: list[torch.Tensor] | None,
    poolings: Sequence[int],
    out: int,
) -> Bags | None: ...

class Kernel:
    def __init__(self, type: int) -> None: ...
    def add_pieces(
        self, work: int, pieces: Sequence[Piece], waits: Waits, counter: int
    ) -> None: ...
    def add_sum(
        self,
        sources: Sequence[End],
        targets: Sequence[End],
        rows: int,
        columns: int,
        waits: Waits,
        counter: int,
    ) -> None: ...

class Operands:
    threads: int
    def __init__(self) -> None: ...
    def set_product(
        self,
        x: int,
        rows: int,
        x_pitch: int,
        w: int,
        type: int,
        transposed: bool,
        pitch: int,
        k: int,
        scale: int,
    ) -> None: ...
    def set_bags(self, bags: Bags) -> None: ...

class KernelRun:
    at: int
    spans: list[tuple[int, int]]
    def __init__(
        self,
        fabric: Fabric,
        kernel: Kernel,
        kernels: str,
        call: int,
        deadline: int,
        pointers: Sequence[int],
        signatures: Sequence[int],
        operands: Operands,
        record: bool,
    ) -> None: ...
    def go(self) -> Outcome: ...

class Repeat:
    def __init__(
        self,
        kernel: Kernel,
        kernels: str,
        signature: int,
        blob: bytes,
        signatures: Sequence[int],
        partial: int,
    ) -> None: ...
    def start(
        self,
        fabric: Fabric,
        call: int,
        patience: int,
        x: int,
        rows: int,
        x_pitch: int,
        w: int,
        type: int,
        transposed: bool,
        pitch: int,
        k: int,
        scale: int,
        y: int,
        inbox: int,
        inbox_offset: int,
        y_offset: int,
        threads: int,
        /,
    ) -> Outcome: ...
    def pool(
        self,
        fabric: Fabric,
        call: int,
        patience: int,
        bags: Bags,
        pointers: Sequence[int],
        offsets: Sequence[int],
        threads: int,
        /,
    ) -> Outcome: ...
    def go(self) -> Outcome: ...

def is_set(name: str) -> bool: ...
def advise_huge(address: int, size: int) -> None: ...
def same_samples(
    w: int, row: int, column: int, packed: int, k: int, n: int, item: int, count: int
) -> bool: ...
