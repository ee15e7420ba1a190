"""The rule by which a schedule is chosen (native/rule.cpp), and the GEMM times it stands on.

`Gemms.cost` gives (launch, compute seconds of the body on all units, the same on the `left` ones,
bytes of memory traffic); `load` is how long the computation is that the GEMM is a piece of.
"""

from collections.abc import Sequence

class Gemms:
    def cost(
        self, m: int, n: int, k: int, load: float, left: int
    ) -> tuple[float, float, float, float]: ...

class Tiled(Gemms):
    def __init__(
        self,
        tiles: Sequence[tuple[int, int, int, float, float]],
        counts: tuple[int, int, int],
        numbers: Sequence[float],
    ) -> None: ...

class Rated(Gemms):
    def __init__(
        self,
        peak: float,
        half: tuple[float, float, float],
        bytes: tuple[float, float, float],
        kernel_and_units: tuple[float, int],
        axes: Sequence[Sequence[float]],
        points: Sequence[tuple[float, float, float, float]],
    ) -> None: ...

class Moving:
    def __init__(
        self,
        first: float,
        following: float,
        completion: float,
        rate: float,
        rate_alone: float,
        rate_own: float,
        row: float,
        bandwidth: float,
        drawn: float,
        share: float,
        slowdown: float = 1.0,
        late: float = 0.0,
        each: float = 0.0,
    ) -> None: ...

class Candidate:
    def __init__(
        self,
        engine: int,
        fusion: int,
        serial: bool,
        one_peer: bool,
        columns: bool,
        uniform: bool,
        depth: int,
    ) -> None: ...

class Machine:
    def __init__(
        self,
        *,
        gemms: Gemms,
        dma: Moving,
        cores: Moving,
        rate: float,
        kernel: float,
        gap: float,
        latency: float,
        bandwidth: float,
        decision: float,
        decision_in_place: float,
        host: float,
        reach: float,
        one_peer: float,
        from_same: float,
        in_place: float,
        full: float,
        element: float,
        result: float,
        sum_bytes: float,
        left: int,
    ) -> None: ...
    def seconds(
        self,
        candidates: Sequence[Candidate],
        form: int,
        world: int,
        m: int,
        rows: int,
        columns: Sequence[int],
        k: int,
        cuts: tuple[int, int, int],
    ) -> list[float]: ...
