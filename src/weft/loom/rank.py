"""One rank of `weft loom check`, which starts `python -m weft.loom.rank TRACES script.py ...`."""

from __future__ import annotations

import ctypes
import faulthandler
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Loads loom as the environment says, runs the script, and waits for the device."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with who started it
    faulthandler.enable(open(sys.argv[1], "a"))  # noqa: SIM115 - open as long as the process is

    import torch

    import weft.loom

    weft.loom.load()
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    torch.accelerator.synchronize()


if __name__ == "__main__":
    main()
