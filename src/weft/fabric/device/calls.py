"""C calls of a vendor's library by ctypes: signatures are given once, and a failed call raises."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import Error, Unsupported

Signatures = Mapping[str, Sequence[Any]]
"""The types of the arguments of each function. All of them return an int, which is 0 if all went
well."""


class Calls:
    """The functions of one library, as attributes. Each raises an `Error` that says what the
    library said, with `hints[name]` added if it has one."""

    def __init__(
        self,
        library: ctypes.CDLL,
        signatures: Signatures,
        text: Callable[[ctypes.CDLL, int], str],
        hints: Mapping[str, str] | None = None,
    ) -> None:
        self._library, self._text, self._hints = library, text, dict(hints or {})
        for name, arguments in signatures.items():
            setattr(self, name, self._checked(name, arguments))

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(f"{name} has no signature")

    def _checked(self, name: str, arguments: Sequence[Any]) -> Callable[..., None]:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return self._missing(name)
        function.restype, function.argtypes = ctypes.c_int, list(arguments)

        def call(*given: Any) -> None:
            code = function(*given)
            if code:
                hint = self._hints.get(name)
                said = f"{name} failed: {self._text(self._library, code)} (error {code})"
                raise Error(f"{said}; {hint}" if hint else said)

        return call

    def _missing(self, name: str) -> Callable[..., None]:
        def call(*given: Any) -> None:
            raise Unsupported(f"this driver is too old for weft: it has no {name}; use a newer one")

        return call


def number(call: Callable[..., None], *arguments: Any) -> int:
    """What a call stores at its first argument, a pointer to an int."""
    found = ctypes.c_int(0)
    call(ctypes.byref(found), *arguments)
    return found.value


def open_library(given: str | os.PathLike[str] | None, stem: str, names: Sequence[str]) -> Any:
    """The library that was given, or the one that this process has loaded already (torch brings its
    own), or the first that is found by name."""
    tried = [os.fspath(given)] if given else [*_loaded(stem), *names]
    problem = ""
    for name in tried:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problem = str(error)
    raise Unsupported(f"weft found no {stem} library ({problem}); install the vendor's driver")


def _loaded(stem: str) -> list[str]:
    """Paths of loaded libraries whose file name begins with `stem`."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return sorted(path for path in paths if Path(path).name.startswith(f"{stem}.so"))
