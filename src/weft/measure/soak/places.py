"""The fabrics that soak runs on: one entry each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft import loom
from weft.errors import Unsupported, nearest
from weft.loom import build
from weft.measure.launch import Report


@dataclass(frozen=True)
class FabricPlace:
    """How ranks come to use a fabric. worlds: numbers of ranks to choose from. environment: the
    variables of a rank, by its number and the number of ranks. device: where tensors are. there:
    whether it is there without further ado. prepare: makes it so. load: what a rank does first."""

    name: str
    worlds: Sequence[int]
    environment: Callable[[int, int], Mapping[str, str]] = lambda rank, world: {}
    device: str = "cpu"
    there: Callable[[], bool] = lambda: True
    prepare: Callable[[Report], object] = lambda report: None
    load: Callable[[], None] = lambda: None


def _loom(rank: int, world: int) -> Mapping[str, str]:
    """What torchrun would set."""
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    of_world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    return {**of_rank, **of_world}


def _load_loom() -> None:
    """Operations run after random delays."""
    loom.load(heap=512, mode="random")
    torch.zeros(1, device="loom")


PLACES = {
    place.name: place
    for place in (
        FabricPlace("host", (2, 3, 4)),
        # Ranks that reach each other by messages alone.
        FabricPlace("flat", (2, 3), lambda rank, world: {"WEFT_FABRIC": "flat"}),
        # Two machines with two ranks each, or one of them with one.
        FabricPlace("two-level", (3, 4), lambda rank, world: {"WEFT_HOST": "ab"[rank // 2]}),
        # The emulated device, where it has been built.
        FabricPlace(
            "loom",
            (2, 3),
            _loom,
            device="loom",
            there=lambda: not build.why_not() and build.library_path().exists(),
            prepare=build.library,
            load=_load_loom,
        ),
    )
}


def places_of(names: str) -> list[FabricPlace]:
    """Places by their names, separated by commas; `all` is all that are there."""
    there = [name for name, place in PLACES.items() if place.there()]
    asked = there if names == "all" else [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in PLACES:
            raise Unsupported(
                f"there is no fabric {name!r} to soak{nearest(name, PLACES)}; "
                f"known: {', '.join(PLACES)}"
            )
    return [PLACES[name] for name in asked]
