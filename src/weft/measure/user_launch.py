"""`weft.launch`: a function of a user on every rank of a new group, from any Python program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from weft.errors import Unsupported, nearest
from weft.measure.rank_process import Report
from weft.measure.rank_processes import Group, run

Result = TypeVar("Result")

BACKENDS = ("gloo", "weft")
DEVICES = ("cpu", "loom", "cuda")
MOST_THREADS = 1024


def launch(
    function: Callable[..., Result],
    *arguments: Any,
    world: int = 2,
    backend: str = "gloo",
    device: str = "cpu",
    threads: int = 1,
    pin: bool = True,
    **options: Any,
) -> list[Result]:
    """Runs `function(*arguments, **options)` on every rank of a new process group on this machine.
    Returns what the ranks return, in the order of ranks.

    It works from a script, `python -c`, standard input or a notebook: the function and what it
    refers to are sent by cloudpickle, and a script needs no `if __name__ == "__main__"`. What a
    rank prints appears here with its number. Tensors of a device come back as CPU tensors. If a
    rank raises an exception, or Ctrl-C is pressed, all ranks end. Over several machines, use
    torchrun.

    Args:
        function: what every rank runs; the process group is there already.
        world: the number of ranks.
        backend: the backend of the group, `"gloo"` or `"weft"`.
        device: `"cpu"`; `"loom"`, which every rank then has loaded; or `"cuda"`, of which every
            rank then has its own selected.
        threads: compute threads per rank.
        pin: whether each rank is pinned to its share of the cores.

    Raises:
        RankFailed: a rank raised an exception. It names the rank and has its traceback.
        Error: a rank raised this error of weft, ended without one, or did not join the group in
            five minutes. It names the rank.
    """
    if not callable(function):
        raise Unsupported(f"launch takes a function first, not {type(function).__name__}")
    for name, number in (("world", world), ("threads", threads)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise Unsupported(f"{name} must be a whole number of at least 1, not {number!r}")
    if threads > MOST_THREADS:
        raise Unsupported(f"threads must be at most {MOST_THREADS}, not {threads!r}")
    for name, value, known in (("backend", backend, BACKENDS), ("device", device, DEVICES)):
        if value not in known:
            raise Unsupported(
                f"{name} must be {' or '.join(known)}, not {value!r}{nearest(str(value), known)}"
            )
    if backend == "weft" and device != "cpu":
        raise Unsupported("the backend weft is for CPU tensors; use backend='gloo' with a device")
    _check_device(device, world)
    group = Group(world, threads, pin, None, backend, device, labelled=True)
    return run(group, _without_report, (function, *arguments), options)


def _without_report(report: Report, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return function(*given, **named)


def _check_device(device: str, world: int) -> None:
    if device == "loom":
        from weft.loom.build import library

        library(_say)  # here, once, so that no rank waits for it
    elif device == "cuda":
        import torch

        count = torch.cuda.device_count()
        if count < world:
            raise Unsupported(f"{world} ranks need {world} GPUs, and this machine has {count}")


def _say(share: float, text: str) -> None:
    if share == 0.0:
        print(text, file=sys.stderr)
