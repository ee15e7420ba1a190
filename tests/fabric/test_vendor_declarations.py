"""The drivers against the vendors' own declarations: headers, and bindings where they are."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from weft.fabric.device import cuda, hip
from weft.fabric.device.device_driver import AT_LEAST, EQUAL

CUDA_CONSTANTS = {
    "CU_STREAM_WAIT_VALUE_GEQ": cuda.WAIT[AT_LEAST],
    "CU_STREAM_WAIT_VALUE_EQ": cuda.WAIT[EQUAL],
    "CU_STREAM_WRITE_VALUE_DEFAULT": cuda.WRITE_DEFAULT,
    "CU_MEMORYTYPE_DEVICE": cuda.MEMORY_DEVICE,
    "CU_STREAM_NON_BLOCKING": cuda.NON_BLOCKING,
    "CU_STREAM_CAPTURE_MODE_RELAXED": cuda.CAPTURE_RELAXED,
    "CU_STREAM_CAPTURE_STATUS_NONE": cuda.CAPTURE_NONE,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": cuda.ATTRIBUTES["multiprocessors"],
    "CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT": cuda.ATTRIBUTES["copy engines"],
    "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED": cuda.ATTRIBUTES["multicast"],
}
HIP_CONSTANTS = {
    "hipStreamWaitValueGte": hip.WAIT[AT_LEAST],
    "hipStreamWaitValueEq": hip.WAIT[EQUAL],
    "hipMemcpyHostToDevice": hip.HOST_TO_DEVICE,
    "hipMemcpyDeviceToHost": hip.DEVICE_TO_HOST,
    "hipMemcpyDeviceToDevice": hip.DEVICE_TO_DEVICE,
    "hipMemcpyDeviceToDeviceNoCU": hip.NO_COMPUTE_UNITS,
    "hipStreamNonBlocking": hip.NON_BLOCKING,
    "hipStreamCaptureModeRelaxed": hip.CAPTURE_RELAXED,
    "hipStreamCaptureStatusNone": hip.CAPTURE_NONE,
    "hipDeviceAttributeMultiprocessorCount": hip.ATTRIBUTES["compute units"],
    "hipDeviceAttributeAsyncEngineCount": hip.ATTRIBUTES["copy engines"],
    "hipDeviceAttributeCanUseStreamWaitValue": hip.ATTRIBUTES["stream wait"],
}

KIND = r"""
#include <cstddef>
#include <type_traits>
// What ctypes must know of an argument: a pointer, or an integer (an enumeration) of so many bytes.
template <class T> constexpr int kind() {
  return std::is_pointer_v<T> ? 0 : int(sizeof(T));
}
template <class T> struct Arguments;
template <class R, class... A> struct Arguments<R (*)(A...)> {
  template <class... K> static constexpr bool are(K... kinds) {
    if constexpr (sizeof...(K) != sizeof...(A)) return false;
    else return sizeof(R) == 4 && ((kind<A>() == kinds) && ...);
  }
};
"""


def kind_of(argument) -> int:
    pointer = argument is ctypes.c_void_p or issubclass(argument, ctypes._Pointer)
    return 0 if pointer else ctypes.sizeof(argument)


def checks(constants, signatures) -> str:
    lines = [f'static_assert(int({name}) == {value}, "");' for name, value in constants.items()]
    for name, arguments in signatures.items():
        kinds = ", ".join(str(kind_of(argument)) for argument in arguments)
        lines.append(f'static_assert(Arguments<decltype(&{name})>::are({kinds}), "{name}");')
    return "\n".join(lines)


def copy_2d_layout() -> str:
    lines = [f"static_assert(sizeof(CUDA_MEMCPY2D) == {ctypes.sizeof(cuda.Copy2D)});"]
    for name, *_ in cuda.Copy2D._fields_:
        offset = getattr(cuda.Copy2D, name).offset
        lines.append(f"static_assert(offsetof(CUDA_MEMCPY2D, {name}) == {offset});")
    return "\n".join(lines)


def include_of(vendor: str, header: str) -> Path:
    """Where a vendor's headers are: beside nvcc, or in Triton, which brings those of both."""
    nvcc = shutil.which("nvcc")
    if vendor == "nvidia" and nvcc:
        done = subprocess.run([nvcc, "--dryrun", "-E", "x.cu"], capture_output=True, text=True)
        for word in done.stderr.replace('"', " ").split():
            if word.startswith("-I") and (Path(word[2:]) / header).exists():
                return Path(word[2:])
    triton = pytest.importorskip("triton", reason="no Triton, which brings the headers")
    found = Path(triton.__file__).parent / "backends" / vendor / "include"
    if not (found / header).exists():
        pytest.skip(f"this Triton brings no {header}")
    return found


def compile_against(vendor: str, header: str, text: str, tmp_path: Path, *options: str) -> str:
    """What a C++ compiler says of the text."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    file = tmp_path / "check.cpp"
    file.write_text(f"#include <{header}>\n{KIND}\n{text}\n")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", *options]
    command += ["-isystem", str(include_of(vendor, header)), str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_cuda_as_its_header_says(tmp_path):
    text = checks(CUDA_CONSTANTS, cuda.SIGNATURES) + copy_2d_layout()
    assert compile_against("nvidia", "cuda.h", text, tmp_path) == ""


def test_hip_as_its_header_says(tmp_path):
    text = checks(HIP_CONSTANTS, hip.SIGNATURES)
    options = ("-D__HIP_PLATFORM_AMD__", "-include", "cstdint")
    assert compile_against("amd", "hip/hip_runtime_api.h", text, tmp_path, *options) == ""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cuStreamWaitValue32_v2", (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)),
        ("cuStreamIsCapturing", (ctypes.c_void_p, ctypes.c_int)),
        ("cuStreamSynchronize", ()),
    ],
)
def test_the_check_finds_a_wrong_signature(tmp_path, name, arguments):
    text = checks({}, {name: arguments})
    assert name in compile_against("nvidia", "cuda.h", text, tmp_path)


def test_cuda_as_its_bindings_say():
    driver = pytest.importorskip(
        "cuda.bindings.driver", reason="cuda-bindings is not installed: pip install 'weft[vendors]'"
    )
    members = {
        name: int(value)
        for kind in vars(driver).values()
        if isinstance(kind, type) and hasattr(kind, "__members__")
        for name, value in kind.__members__.items()
    }
    assert {name: members[name] for name in CUDA_CONSTANTS} == CUDA_CONSTANTS
    for name in cuda.SIGNATURES:
        assert hasattr(driver, name.removesuffix("_v2")), name


def test_hip_as_its_bindings_say():
    found = pytest.importorskip(
        "rocm.bindings.hip", reason="hip-python is not installed: pip install 'weft[vendors]'"
    )
    members = {
        name: int(value)
        for kind in vars(found).values()
        if isinstance(kind, type) and hasattr(kind, "__members__")
        for name, value in kind.__members__.items()
    }
    given = {name: members.get(name, getattr(found, name, None)) for name in HIP_CONSTANTS}
    assert given == HIP_CONSTANTS
    for name in hip.SIGNATURES:
        assert hasattr(found, name), name


def test_who_copies_on_rocm():
    kept, old = hip.ENGINE_KEPT, 70226015
    small = dict(hip.SMALL_COPIES)
    assert hip.who_copies(kept, {})[0] == "engine"
    assert hip.who_copies(kept, {"HSA_ENABLE_SDMA": "0"})[0] == "kernel"
    assert hip.who_copies(kept, {"HSA_ENABLE_PEER_SDMA": "0", **small})[0] == "kernel"
    assert hip.who_copies(kept, {"HSA_ENABLE_SDMA": "1"})[0] == "engine"
    who, limits = hip.who_copies(old, {})
    assert who == "unknown"
    assert "start Python with ROC_P2P_SDMA_SIZE=0 GPU_FORCE_BLIT_COPY_SIZE=0" in limits[0]
    who, limits = hip.who_copies(old, small)
    assert who == "unknown"
    assert "7.2.26015" in limits[0]
    assert "start Python" not in limits[0]
