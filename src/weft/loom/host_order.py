"""Where the hosts of ranks meet: collectives and messages of torch.distributed, written to the log.

A host that has waited for its device and then meets another host has told it so: what the other one
issues from then on comes after. Without this, every program that begins with `dist.barrier()` would
be full of races. Other ways in which processes tell each other something (files, a store used
directly, other libraries) are not seen.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d

from weft.loom.library import loaded

_FROM_ALL = (
    *("barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor"),
    *("all_gather_object", "all_to_all", "all_to_all_single", "reduce_scatter"),
    *("reduce_scatter_tensor", "symm_mem.rendezvous"),
)
_FROM_ROOT = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list")
_TO_ROOT = ("reduce", "gather", "gather_object")

_calls: Counter[str] = Counter()


def install() -> None:
    """Wraps torch.distributed's functions, wherever they are found by name."""
    if not dist.is_available():
        return
    for name in (*_FROM_ALL, *_FROM_ROOT, *_TO_ROOT):
        _wrap(name, _collective(name))
    for name in ("send", "recv"):
        _wrap(name, _message(name))
    if not hasattr(symm_mem.rendezvous, "_loom"):
        plain = symm_mem.rendezvous

        def rendezvous(tensor: Any, group: Any) -> Any:
            """All ranks of the group come to it, as to a barrier."""
            found = _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
            meeting = _collective("symm_mem.rendezvous")(lambda **_: plain(tensor, group))
            return meeting(group=found)

        rendezvous._loom = True  # type: ignore[attr-defined]
        symm_mem.rendezvous = rendezvous


def _wrap(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    plain = getattr(distributed_c10d, name, None)
    if plain is None or hasattr(plain, "_loom"):
        return
    wrapped = make(plain)
    wrapped._loom = True  # type: ignore[attr-defined]
    for module in (distributed_c10d, dist):
        if getattr(module, name, None) is plain:
            setattr(module, name, wrapped)


def _leave(key: str, peers: list[int]) -> None:
    array = (ctypes.c_int * max(1, len(peers)))(*peers)
    loaded().calls.loom_host_leave(key.encode(), array, len(peers))


class _Work:
    """A collective under way: the host learns of its peers when it waits for it."""

    def __init__(self, work: Any, key: str, peers: list[int]) -> None:
        self._work, self._key, self._peers = work, key, peers

    def wait(self, *arguments: Any, **options: Any) -> Any:
        done = self._work.wait(*arguments, **options)
        loaded().calls.loom_host_enter(f"{self._key} waited".encode())
        _leave(self._key, self._peers)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _collective(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*arguments: Any, **options: Any) -> Any:
            group = options.get("group") or next(
                (a for a in arguments if isinstance(a, dist.ProcessGroup)), None
            )
            if not dist.is_initialized() or distributed_c10d._rank_not_in_group(group):
                return plain(*arguments, **options)
            members = dist.get_process_group_ranks(group)
            counted = f"{members}/{name}"
            _calls[counted] += 1
            key = f"{counted}/{_calls[counted]}"
            peers = _heard(name, members, arguments, options)
            loaded().calls.loom_host_enter(key.encode())
            result = None
            try:
                result = plain(*arguments, **options)
            finally:
                _leave(key, [] if hasattr(result, "wait") else peers)
            return _Work(result, key, peers) if hasattr(result, "wait") else result

        return call

    return make


def _heard(
    name: str, members: list[int], arguments: tuple[Any, ...], options: dict[str, Any]
) -> list[int]:
    """Whose host is known to have come so far when the call returns."""
    if name in _FROM_ALL:
        return members
    place = "dst" if name in _TO_ROOT else "src"
    position = 1 if name in ("broadcast", "broadcast_object_list", "reduce") else 2
    root = options.get(place, arguments[position] if len(arguments) > position else 0)
    if options.get(f"group_{place}") is not None:
        root = members[options[f"group_{place}"]]
    if name in _FROM_ROOT:
        return [root]
    return members if dist.get_rank() == root else []


def _message(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(tensor: Any, peer: Any = None, *arguments: Any, **options: Any) -> Any:
            known = peer if peer is not None else options.get("dst" if name == "send" else "src")
            me = dist.get_rank()
            if known is None:  # from anybody: who it was is known only afterwards
                return plain(tensor, peer, *arguments, **options)
            source, target = (me, known) if name == "send" else (known, me)
            counted = f"{source} to {target}/{options.get('tag', 0)}"
            _calls[f"{name} {counted}"] += 1
            key = f"{counted}/{_calls[f'{name} {counted}']}"
            calls = loaded().calls
            calls.loom_host_enter((key if name == "send" else f"{key} received").encode())
            try:
                if peer is None:
                    return plain(tensor, *arguments, **options)
                return plain(tensor, peer, *arguments, **options)
            finally:
                _leave(key, [source] if name == "recv" else [])

        return call

    return make
