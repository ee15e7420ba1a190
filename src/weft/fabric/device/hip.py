"""The driver of ROCm: calls of libamdhip64 by ctypes.

Here an ordinary copy between GPUs may be made by a kernel: always below ROC_P2P_SDMA_SIZE, and at
any size for some memory and some versions. So the driver asks for an engine where the version keeps
that promise (`hipMemcpyDeviceToDeviceNoCU`), refuses where the environment forbids engines, and
says in its facts what is not certain. Nothing of this was run on a GPU; `weft doctor --gpu` finds
out there (docs/gpu.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint32, c_void_p

import torch

from weft.errors import Unsupported
from weft.fabric.device.calls import Calls, number, open_library
from weft.fabric.device.device_driver import AT_LEAST, EQUAL, Facts, pitched, stream_handle
from weft.fabric.device.host_word import HostWords

WAIT = {AT_LEAST: 0, EQUAL: 1}
"""hipStreamWaitValueGte, hipStreamWaitValueEq"""
WHOLE_WORD = 0xFFFFFFFF
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, NO_COMPUTE_UNITS = 1, 2, 3, 1024
"""hipMemcpyHostToDevice, DeviceToHost, DeviceToDevice, DeviceToDeviceNoCU"""
NON_BLOCKING = 1
"""hipStreamNonBlocking"""
CAPTURE_RELAXED, CAPTURE_NONE = 2, 0
"""hipStreamCaptureModeRelaxed, hipStreamCaptureStatusNone"""
ATTRIBUTES = {"compute units": 63, "copy engines": 2, "stream wait": 10013}
"""hipDeviceAttributeMultiprocessorCount, AsyncEngineCount, CanUseStreamWaitValue"""

ENGINE_KEPT = 71526400
"""The first HIP version whose NoCU copies between GPUs neither fall back to a kernel nor leave
their target unwritten: 7.15, built in week 40 of 2026, after ROCm/rocm-systems #9100 and #11318."""

ENVIRONMENT = (
    "HSA_ENABLE_SDMA",
    "HSA_ENABLE_PEER_SDMA",
    "ROC_P2P_SDMA_SIZE",
    "GPU_FORCE_BLIT_COPY_SIZE",
    "GPU_MAX_HW_QUEUES",
    "GPU_STREAMOPS_CP_WAIT",
    "HIP_LAUNCH_BLOCKING",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_SYMMMEM",
)
FORBIDDING = ("HSA_ENABLE_SDMA", "HSA_ENABLE_PEER_SDMA")
"""If one of these is 0, only kernels copy between GPUs."""
SMALL_COPIES = {"ROC_P2P_SDMA_SIZE": "0", "GPU_FORCE_BLIT_COPY_SIZE": "0"}
"""What makes small copies go to an engine too; to be set before the process starts."""

SIGNATURES = {
    "hipMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "hipStreamWriteValue32": (c_void_p, c_void_p, c_uint32, c_uint),
    "hipStreamWaitValue32": (c_void_p, c_void_p, c_uint32, c_uint, c_uint32),
    "hipStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "hipStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "hipStreamSynchronize": (c_void_p,),
    "hipThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "hipDeviceGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipDriverGetVersion": (POINTER(c_int),),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "hipDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
}

HINTS = {
    "hipStreamWaitValue32": "streams of this GPU may not wait for words; run weft doctor --gpu",
    "hipStreamWriteValue32": "streams of this GPU may not write words; run weft doctor --gpu",
}


class HipDriver:
    """Copies, posts and waits on the streams of one ROCm device. library: the path of another
    library with the names of libamdhip64."""

    name = "hip"
    pitched = False

    def __init__(self, device: int = 0, library: str | os.PathLike[str] | None = None) -> None:
        names = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
        found = open_library(library, "libamdhip64", names)
        self.device, self.calls = device, Calls(found, SIGNATURES, _text, HINTS)
        self.version = number(self.calls.hipRuntimeGetVersion)
        self.copies, self.limits = who_copies(self.version, os.environ)
        kept = self.version >= ENGINE_KEPT
        self._kind = NO_COMPUTE_UNITS if kept else DEVICE_TO_DEVICE
        self._words = HostWords(_HipWordCopies(self.calls, device))

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """See `Driver.copy`. Raises `Unsupported` for a pitched copy, which ROCm makes with a
        kernel, and where the environment forbids engines."""
        if self.copies == "kernel":
            raise Unsupported(self.limits[0])
        width, rows, *_ = pitched(target, source)
        if not width or not rows:
            return
        if rows > 1:
            raise Unsupported(
                "ROCm copies rows that are apart with a kernel, never with an engine; use a "
                "schedule that cuts rows (1d), or pack the columns first"
            )
        self.calls.hipMemcpyAsync(
            target.data_ptr(), source.data_ptr(), width, self._kind, stream_handle(stream)
        )

    def post(self, word: int, value: int, stream: torch.Stream) -> None:
        """See `Driver.post`. ROCm makes it with a kernel of one thread."""
        self.calls.hipStreamWriteValue32(stream_handle(stream), word, value, 0)

    def wait(self, word: int, value: int, stream: torch.Stream, compare: int = AT_LEAST) -> None:
        """See `Driver.wait`. ROCm makes it with a kernel of one thread, which spins, unless
        GPU_STREAMOPS_CP_WAIT is set."""
        self.calls.hipStreamWaitValue32(
            stream_handle(stream), word, value, WAIT[compare], WHOLE_WORD
        )

    def capturing(self, stream: torch.Stream) -> bool:
        status = c_int(CAPTURE_NONE)
        self.calls.hipStreamIsCapturing(stream_handle(stream), byref(status))
        return status.value != CAPTURE_NONE

    def release(self, word: int, value: int) -> None:
        """See `Driver.release`."""
        self._words.write(word, value)

    def read(self, word: int) -> int:
        """See `Driver.read`."""
        return self._words.read(word)

    def facts(self) -> Facts:
        versions = {
            "runtime": version_text(self.version),
            "driver": version_text(number(self.calls.hipDriverGetVersion)),
        }
        attribute = self.calls.hipDeviceGetAttribute
        attributes = {name: number(attribute, k, self.device) for name, k in ATTRIBUTES.items()}
        return Facts(
            name="hip",
            version=versions["runtime"],
            copies=self.copies,
            stream_words=bool(attributes["stream wait"]),
            environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            versions=versions,
            peers=self._peers(),
            attributes=attributes,
            limits=self.limits,
        )

    def _peers(self) -> tuple[tuple[bool, ...], ...]:
        devices = range(number(self.calls.hipGetDeviceCount))
        can = self.calls.hipDeviceCanAccessPeer
        return tuple(tuple(a == b or bool(number(can, a, b)) for b in devices) for a in devices)


def who_copies(version: int, environment: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Who copies between GPUs (engine, kernel or unknown), and what this driver cannot do there."""
    words = "a stream writes and waits for words with a kernel of one thread"
    rows = "ROCm copies rows that are apart (2d schedules) with a kernel; the driver refuses them"
    for name in FORBIDDING:
        if environment.get(name) == "0":
            return "kernel", (
                f"{name}=0 makes ROCm copy between GPUs with kernels; unset it before Python "
                "starts",
                rows,
                words,
            )
    if version >= ENGINE_KEPT:
        return "engine", (rows, words)
    line = " ".join(f"{name}={value}" for name, value in SMALL_COPIES.items())
    old = f"HIP {version_text(version)} may copy between GPUs with a kernel"
    if all(environment.get(name) == value for name, value in SMALL_COPIES.items()):
        return "unknown", (f"{old}; weft doctor --gpu finds out", rows, words)
    return "unknown", (
        f"{old}, and does so below 1 MiB; start Python with {line}, and run weft doctor --gpu",
        rows,
        words,
    )


def version_text(version: int) -> str:
    """HIP's version number as text: 71526333 is 7.15.26333."""
    return f"{version // 10_000_000}.{version // 100_000 % 100}.{version % 100_000}"


class _HipWordCopies:
    """Copies of words between the host and a ROCm device."""

    def __init__(self, calls: Calls, device: int) -> None:
        self._calls, self._device = calls, device

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, mode = number(self._calls.hipGetDevice), c_int(CAPTURE_RELAXED)
        self._calls.hipSetDevice(self._device)
        self._calls.hipThreadExchangeStreamCaptureMode(byref(mode))
        try:
            yield
        finally:
            self._calls.hipThreadExchangeStreamCaptureMode(byref(mode))
            self._calls.hipSetDevice(before)

    def open_stream(self) -> int:
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._calls.hipDeviceGetStreamPriorityRange(byref(least), byref(greatest))
        self._calls.hipStreamCreateWithPriority(byref(stream), NON_BLOCKING, greatest)
        return stream.value or 0

    def to_device(self, word: int, host: int, stream: int) -> None:
        self._calls.hipMemcpyAsync(word, host, 4, HOST_TO_DEVICE, stream)

    def to_host(self, host: int, word: int, stream: int) -> None:
        self._calls.hipMemcpyAsync(host, word, 4, DEVICE_TO_HOST, stream)

    def finish(self, stream: int) -> None:
        self._calls.hipStreamSynchronize(stream)


def _text(library: ctypes.CDLL, code: int) -> str:
    library.hipGetErrorString.restype = ctypes.c_char_p
    found: bytes | None = library.hipGetErrorString(c_int(code))
    return (found or b"unknown error").decode()
