"""The native parts by themselves: native/tests, built here and run.

The build also compares the types of all files when it links them (`-Wodr`): two types of one name,
which are undefined behaviour, are an error. `make native-test` does the same and shows every test;
`make sanitize` runs them under sanitizers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "native-tests"
OPTIONS = ["-DWEFT_MODULES=OFF", "-DWEFT_TESTS=ON"]
ODR = "-flto=auto -Wodr -Werror=odr"


def run(*command: str | Path, within: float = 900) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def is_gcc(compiler: str) -> bool:
    return "Free Software Foundation" in run(compiler, "--version")


@pytest.fixture(scope="module")
def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("c++")
    if not found or not shutil.which("cmake"):
        pytest.skip("a C++ compiler and cmake are needed, and one of them is not here")
    return found


def test_native_parts_by_themselves(compiler):
    check = ["-DWEFT_ODR=ON"] if is_gcc(compiler) else []
    run("cmake", "-S", ROOT / "native", "-B", BUILD, *OPTIONS, *check)
    run("cmake", "--build", BUILD, "--parallel", str(os.cpu_count() or 1))
    said = run(BUILD / "native_tests", within=120)
    assert said.splitlines()[-1].endswith("tests, 0 failed")


CLASHES = {
    "one.cpp": "#include <vector>\nstruct Piece { char* data; };\n"
    "std::vector<Piece> one; int main() { return int(one.size()); }\n",
    "two.cpp": "#include <vector>\nstruct Piece { double first, second, third; };\n"
    "std::vector<Piece> two(3);\n",
}


def test_two_types_of_one_name_would_be_found(compiler, tmp_path):
    """The flags of the build do find what they are for."""
    if not is_gcc(compiler):
        pytest.skip("only gcc compares the types of all files when it links")
    assert f"add_link_options({ODR}" in (ROOT / "native" / "CMakeLists.txt").read_text()
    for name, text in CLASHES.items():
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in CLASHES]
    said = subprocess.run(
        [compiler, *ODR.split(), "-o", tmp_path / "both", *files],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.returncode != 0
    assert "violates the C++ One Definition Rule" in said.stderr
