"""The driver of CUDA: calls of libcuda by ctypes.

Copies between GPUs are made by copy engines, contiguous ones and pitched ones. Words are written
and waited for by the front end of a GPU, which needs no multiprocessor. Nothing of this was run on
a GPU; `weft doctor --gpu` finds out there (docs/gpu.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

import torch

from weft.fabric.device.calls import Calls, number, open_library
from weft.fabric.device.device_driver import AT_LEAST, EQUAL, Facts, pitched, stream_handle
from weft.fabric.device.host_word import HostWords

WAIT = {AT_LEAST: 0, EQUAL: 1}
"""CU_STREAM_WAIT_VALUE_GEQ, which compares (int32)(word - value) >= 0, and _EQ."""
WRITE_DEFAULT = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT: with a memory barrier before the write."""
MEMORY_DEVICE = 2
"""CU_MEMORYTYPE_DEVICE"""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING"""
CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""
CAPTURE_NONE = 0
"""CU_STREAM_CAPTURE_STATUS_NONE"""
ATTRIBUTES = {"multiprocessors": 16, "copy engines": 40, "multicast": 132}
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _ASYNC_ENGINE_COUNT, _MULTICAST_SUPPORTED"""

ENVIRONMENT = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_SYMMMEM",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2."""

    _fields_ = (
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcMemoryType", c_uint),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstMemoryType", c_uint),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    )


SIGNATURES = {
    "cuInit": (c_uint,),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(Copy2D), c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamSynchronize": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
}

HINTS = {
    "cuStreamWaitValue32_v2": "streams of this GPU cannot wait for words; run weft doctor --gpu",
    "cuStreamWriteValue32_v2": "streams of this GPU cannot write words; run weft doctor --gpu",
}


class CudaDriver:
    """Copies, posts and waits on the streams of one CUDA device. library: the path of another
    library with the names of libcuda."""

    name = "cuda"
    pitched = True

    def __init__(self, device: int = 0, library: str | os.PathLike[str] | None = None) -> None:
        found = open_library(library, "libcuda", ("libcuda.so.1", "libcuda.so"))
        self.device, self.calls = device, Calls(found, SIGNATURES, _text, HINTS)
        self.calls.cuInit(0)
        self._words = HostWords(_CudaWordCopies(self.calls, device))

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """See `Driver.copy`. Between two GPUs an engine copies; inside of one GPU, CUDA may use its
        multiprocessors."""
        width, rows, target_pitch, source_pitch = pitched(target, source)
        if not width or not rows:
            return
        handle = stream_handle(stream)
        if rows == 1:
            self.calls.cuMemcpyDtoDAsync_v2(target.data_ptr(), source.data_ptr(), width, handle)
            return
        shape = Copy2D(
            srcMemoryType=MEMORY_DEVICE,
            srcDevice=source.data_ptr(),
            srcPitch=source_pitch,
            dstMemoryType=MEMORY_DEVICE,
            dstDevice=target.data_ptr(),
            dstPitch=target_pitch,
            WidthInBytes=width,
            Height=rows,
        )
        self.calls.cuMemcpy2DAsync_v2(byref(shape), handle)

    def post(self, word: int, value: int, stream: torch.Stream) -> None:
        """See `Driver.post`. A graph captures it as it is."""
        self.calls.cuStreamWriteValue32_v2(stream_handle(stream), word, value, WRITE_DEFAULT)

    def wait(self, word: int, value: int, stream: torch.Stream, compare: int = AT_LEAST) -> None:
        """See `Driver.wait`."""
        self.calls.cuStreamWaitValue32_v2(stream_handle(stream), word, value, WAIT[compare])

    def capturing(self, stream: torch.Stream) -> bool:
        status = c_int(CAPTURE_NONE)
        self.calls.cuStreamIsCapturing(stream_handle(stream), byref(status))
        return status.value != CAPTURE_NONE

    def release(self, word: int, value: int) -> None:
        """See `Driver.release`."""
        self._words.write(word, value)

    def read(self, word: int) -> int:
        """See `Driver.read`."""
        return self._words.read(word)

    def facts(self) -> Facts:
        version = number(self.calls.cuDriverGetVersion)
        text = f"{version // 1000}.{version % 1000 // 10}"
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        limits = ["copies inside one GPU may be made by its multiprocessors"]
        if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            limits.append(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 lets all streams share one queue, so copies wait "
                "for kernels; unset it before Python starts, or set it to 8 or more"
            )
        return Facts(
            name="cuda",
            version=text,
            copies="engine",
            stream_words=True,
            environment=environment,
            versions={"driver": text, "runtime": torch.version.cuda or "none"},
            peers=self._peers(),
            attributes=self._attributes(),
            limits=tuple(limits),
        )

    def _peers(self) -> tuple[tuple[bool, ...], ...]:
        devices = range(number(self.calls.cuDeviceGetCount))
        can = self.calls.cuDeviceCanAccessPeer
        return tuple(tuple(a == b or bool(number(can, a, b)) for b in devices) for a in devices)

    def _attributes(self) -> dict[str, int]:
        get = self.calls.cuDeviceGetAttribute
        return {name: number(get, code, self.device) for name, code in ATTRIBUTES.items()}


class _CudaWordCopies:
    """Copies of words between the host and a CUDA device."""

    def __init__(self, calls: Calls, device: int) -> None:
        self._calls, self._device = calls, device
        self._context = c_void_p()

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, mode = c_void_p(), c_int(CAPTURE_RELAXED)
        if not self._context:
            self._calls.cuDevicePrimaryCtxRetain(byref(self._context), self._device)
        self._calls.cuCtxGetCurrent(byref(before))
        self._calls.cuCtxSetCurrent(self._context)
        self._calls.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            yield
        finally:
            self._calls.cuThreadExchangeStreamCaptureMode(byref(mode))
            self._calls.cuCtxSetCurrent(before)

    def open_stream(self) -> int:
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._calls.cuCtxGetStreamPriorityRange(byref(least), byref(greatest))
        self._calls.cuStreamCreateWithPriority(byref(stream), NON_BLOCKING, greatest)
        return stream.value or 0

    def to_device(self, word: int, host: int, stream: int) -> None:
        self._calls.cuMemcpyHtoDAsync_v2(word, host, 4, stream)

    def to_host(self, host: int, word: int, stream: int) -> None:
        self._calls.cuMemcpyDtoHAsync_v2(host, word, 4, stream)

    def finish(self, stream: int) -> None:
        self._calls.cuStreamSynchronize(stream)


def _text(library: ctypes.CDLL, code: int) -> str:
    found = ctypes.c_char_p()
    library.cuGetErrorString(c_int(code), byref(found))
    return (found.value or b"unknown error").decode()
