"""`make wheel-check`: builds a wheel, installs it into a new environment, and uses it there without
a compiler in the path. With `--keep`, an environment from an earlier check is used again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "wheel-check"
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
CALL = """
import torch, torch.distributed as dist, weft
def call():
    return weft.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 3)).sum().item()
assert weft.launch(call, world=2) == [48.0, 48.0]
assert "site-packages" in weft.__file__
print("a call on two ranks: right")
"""


def main() -> None:
    shutil.rmtree(FOLDER / "dist", ignore_errors=True)
    wheel = [*PIP, "wheel", "--no-deps", "-w", str(FOLDER / "dist"), str(ROOT)]
    subprocess.run([sys.executable, *wheel], check=True)
    (made,) = (FOLDER / "dist").glob("*.whl")
    print(f"built {made.name}, {made.stat().st_size / 1e6:.1f} MB")
    python = FOLDER / "venv" / "bin" / "python"
    if "--keep" not in sys.argv or not python.exists():
        shutil.rmtree(FOLDER / "venv", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / "venv")], check=True)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, *PIP, "install", *constraints, str(made)], check=True)
    again = [*PIP, "install", "--no-deps", "--force-reinstall", str(made)]
    subprocess.run([python, *again], check=True)

    # Only this environment is in the path: no compiler, no cmake, no other Python.
    kept = {"HOME", "LANG", "TMPDIR"}
    environment = {name: os.environ[name] for name in kept & set(os.environ)}
    environment["PATH"] = str(python.parent)
    assert shutil.which("c++", path=environment["PATH"]) is None

    def run(*command: str, code: int = 0) -> str:
        done = subprocess.run(
            command, env=environment, cwd=FOLDER, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    weft = str(python.parent / "weft")
    version = made.name.split("-")[1]
    assert run(weft, "--version") == f"weft {version}\n"
    print(run(str(python), "-c", CALL), end="")
    assert "weft works here" in run(weft, "doctor")
    assert "h100" in run(weft, "machine", "list")
    shape = ["--m", "4096", "--n", "4096", "--k", "1024"]
    assert "adaptive" in run(weft, "explore", *shape, "--machine", "h100")
    # loom is compiled where it is used; without a compiler it says so, in one sentence.
    environment["WEFT_LOOM_CACHE"] = str(FOLDER / "no-loom")
    assert "found no C++ compiler; install g++" in run(weft, "loom", "build", code=2)
    print(f"{made.name} works without a compiler")


if __name__ == "__main__":
    main()
