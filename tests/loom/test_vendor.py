"""The names of CUDA and HIP over loom: a driver's calls are executed, wrong ones refused."""

from __future__ import annotations

import pytest

# -- inside the ranks ------------------------------------------------------------------------------


def call_runtime(prefix):
    """Copies of all kinds, words, memory and events by the vendor's names, across two ranks."""
    import ctypes

    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    from weft.loom.driver import vendor_library

    lib, p = vendor_library(), ctypes.c_void_p
    rank = dist.get_rank()
    x = symm.empty(4, 8, dtype=torch.int32, device="loom")
    words = symm.empty(4, dtype=torch.int32, device="loom")
    handle = symm.rendezvous(x, dist.group.WORLD)
    word_handle = symm.rendezvous(words, dist.group.WORLD)
    words.zero_()
    x.copy_(torch.arange(32).reshape(4, 8) + 100 * rank)
    torch.accelerator.synchronize()
    dist.barrier()
    s = torch.Stream("loom")
    stream = p(s.native_handle)
    mine = torch.zeros(4, 8, dtype=torch.int32, device="loom")
    block = torch.zeros(4, 2, dtype=torch.int32, device="loom")
    s.wait_stream(torch.accelerator.current_stream())
    peer, size = p(handle.buffer_ptrs[1 - rank]), ctypes.c_size_t
    results = {}
    copy, copy_2d = (getattr(lib, prefix + n) for n in ("MemcpyAsync", "Memcpy2DAsync"))
    results["copy"] = copy(p(mine.data_ptr()), peer, size(128), 3, stream)
    column = p(handle.buffer_ptrs[1 - rank] + 12)
    results["2d"] = copy_2d(
        p(block.data_ptr()), size(8), column, size(32), size(8), size(4), 4, stream
    )
    # A word to the peer after the copies, and a wait for the peer's.
    theirs, own = word_handle.buffer_ptrs[1 - rank], words.data_ptr()
    if prefix == "cuda":
        results["write"] = lib.cuStreamWriteValue32_v2(stream, ctypes.c_uint64(theirs), 3, 0)
        results["wait"] = lib.cuStreamWaitValue32_v2(stream, ctypes.c_uint64(own), 3, 0)
        results["set"] = lib.cuMemsetD32Async(ctypes.c_uint64(own + 8), 7, size(2), stream)
        wrong_flags = lib.cuStreamWaitValue32_v2(stream, ctypes.c_uint64(own), 3, 8)
    else:
        mask = ctypes.c_uint32(0xFFFFFFFF)
        results["write"] = lib.hipStreamWriteValue32(stream, p(theirs), 3, 0)
        results["wait"] = lib.hipStreamWaitValue32(stream, p(own), 3, 0, mask)
        results["set"] = lib.hipMemsetD32Async(p(own + 8), 7, size(2), stream)
        wrong_flags = lib.hipStreamWaitValue32(stream, p(own), 3, 0, 1)
    capturing = ctypes.c_int(-1)
    results["capturing"] = getattr(lib, prefix + "StreamIsCapturing")(
        stream, ctypes.byref(capturing)
    )
    event = p()
    getattr(lib, prefix + "EventCreateWithFlags")(ctypes.byref(event), 0)
    results["record"] = getattr(lib, prefix + "EventRecord")(event, stream)
    results["sync"] = getattr(lib, prefix + "EventSynchronize")(event)
    getattr(lib, prefix + "EventDestroy")(event)
    text = getattr(lib, prefix + "GetErrorString")
    text.restype = ctypes.c_char_p
    host = torch.zeros(32, dtype=torch.int32)
    wrong_kind = copy(p(host.data_ptr()), peer, size(128), 3, stream)
    last = getattr(lib, prefix + "GetLastError")()
    cleared = getattr(lib, prefix + "GetLastError")()
    torch.accelerator.current_stream().wait_stream(s)
    expected = torch.arange(32).reshape(4, 8) + 100 * (1 - rank)
    right = bool((mine.cpu() == expected).all()) and bool((block.cpu() == expected[:, 3:5]).all())
    flags = words.cpu().tolist()
    dist.barrier()
    return results, right, flags, capturing.value, (wrong_kind, wrong_flags, last, cleared), text(1)


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_a_drivers_calls_are_executed(loom_pools, prefix):
    for results, right, flags, capturing, wrong, text in loom_pools(2).run(call_runtime, prefix):
        assert set(results.values()) == {0}, results
        assert right
        assert flags == [3, 0, 7, 7]
        assert capturing == 0
        assert wrong == (1, 1, 1, 0)
        assert text == b"invalid argument"


def memory_of_a_peer(prefix):
    import ctypes

    import torch
    import torch.distributed as dist

    from weft.loom.driver import vendor_library

    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 64)]

    lib, p = vendor_library(), ctypes.c_void_p
    rank, pointer, handle, opened = dist.get_rank(), p(), Handle(), p()
    assert getattr(lib, prefix + "Malloc")(ctypes.byref(pointer), ctypes.c_size_t(256)) == 0
    fill = getattr(lib, prefix + "MemsetAsync")
    assert fill(pointer, rank + 1, ctypes.c_size_t(256), None) == 0
    torch.accelerator.synchronize()
    assert getattr(lib, prefix + "IpcGetMemHandle")(ctypes.byref(handle), pointer) == 0
    handles = [None, None]
    dist.all_gather_object(handles, ctypes.string_at(ctypes.byref(handle), 64))
    theirs = Handle.from_buffer_copy(handles[1 - rank])
    assert getattr(lib, prefix + "IpcOpenMemHandle")(ctypes.byref(opened), theirs, 1) == 0
    own = getattr(lib, prefix + "IpcOpenMemHandle")(ctypes.byref(p()), handle, 1)
    x = torch.zeros(256, dtype=torch.uint8, device="loom")
    copy = getattr(lib, prefix + "MemcpyAsync")
    assert copy(p(x.data_ptr()), opened, ctypes.c_size_t(256), 3, None) == 0
    values = x.cpu().unique().tolist()
    dist.barrier()
    assert getattr(lib, prefix + "IpcCloseMemHandle")(opened) == 0
    assert getattr(lib, prefix + "Free")(pointer) == 0
    return values, own, getattr(lib, prefix + "Free")(p(12345))


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_memory_of_another_process_is_opened_by_handle(loom_pools, prefix):
    for rank, (values, own, wrong) in enumerate(loom_pools(2).run(memory_of_a_peer, prefix)):
        assert values == [2 - rank]
        assert (own, wrong) == (1, 1)


def batched_words():
    import ctypes

    import torch

    from weft.loom.driver import vendor_library

    class Operation(ctypes.Structure):
        _fields_ = [
            ("operation", ctypes.c_uint32),
            ("address", ctypes.c_uint64),
            ("value", ctypes.c_uint64),
            ("flags", ctypes.c_uint32),
            ("rest", ctypes.c_uint32 * 5),
        ]

    assert ctypes.sizeof(Operation) == 48
    words = torch.zeros(2, dtype=torch.int32, device="loom")
    s = torch.Stream("loom")
    s.wait_stream(torch.accelerator.current_stream())
    a, b = words.data_ptr(), words.data_ptr() + 4
    batch = (Operation * 3)(Operation(2, a, 1, 0), Operation(1, a, 1, 1), Operation(2, b, 4, 0))
    lib, stream = vendor_library(), ctypes.c_void_p(s.native_handle)
    code = lib.cuStreamBatchMemOp_v2(stream, 3, batch, 0)
    unknown = lib.cuStreamBatchMemOp_v2(stream, 1, (Operation * 1)(Operation(99)), 0)
    torch.accelerator.current_stream().wait_stream(s)
    return code, unknown, words.cpu().tolist()


def test_words_in_a_batch(loom_pools):
    assert loom_pools(1).run(batched_words)[0] == (0, 1, [1, 4])
