"""The fabrics that soak runs on: one entry each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.errors import Unsupported, nearest


@dataclass(frozen=True)
class Place:
    """How ranks come to use a fabric. worlds: numbers of ranks to choose from. environment: the
    variables of a rank. device: where tensors are. setup: what a rank imports first, if its device
    needs that."""

    name: str
    worlds: Sequence[int]
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {}
    device: str = "cpu"
    setup: str = ""


PLACES = {
    place.name: place
    for place in (
        Place("host", (2, 3, 4)),
        # Ranks that reach each other by messages alone.
        Place("flat", (2, 3), lambda rank: {"WEFT_FABRIC": "flat"}),
        # Two machines with two ranks each, or one of them with one.
        Place("two-level", (3, 4), lambda rank: {"WEFT_HOST": "ab"[rank // 2]}),
    )
}


def places_of(names: str) -> list[Place]:
    """Places by their names, separated by commas; `all` is all of them."""
    asked = list(PLACES) if names == "all" else [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in PLACES:
            raise Unsupported(
                f"there is no fabric {name!r} to soak{nearest(name, PLACES)}; "
                f"known: {', '.join(PLACES)}"
            )
    return [PLACES[name] for name in asked]
