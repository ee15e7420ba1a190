"""Operations that take one dtype and give another: proved plans, bytes by buffer, times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft import InvalidPlan, Schedule, Unsupported
from weft import dtype as dtypes
from weft.machine import load
from weft.operation import find, result_dtype
from weft.plan.interpret import interpret
from weft.plan.tasks import Copy
from weft.plan.verify import verify
from weft.simulate.simulation import run

GATHER = ("all_gather_matmul", "all_to_all_matmul", "gather_contract")
SEND = ("matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all")
PAIRS = (("float8_e4m3fn", "bfloat16"), ("int8", "float32"), ("bfloat16", "float32"))


def plans(op):
    for schedule in Schedule.space(op):
        try:
            yield op.lower(schedule)
        except Unsupported:
            continue


@pytest.mark.parametrize("name", [*GATHER, *SEND])
@pytest.mark.parametrize(("given", "result"), PAIRS)
def test_every_schedule_is_proved_and_keeps_each_buffer_in_its_dtype(name, given, result):
    op = find(name).of(24, 6, 8, 3, given, result=result)
    plain = find(name).of(24, 6, 8, 3, given)
    assert f"{given} to {result}" in op.label
    count = 0
    for plan in plans(op):
        verify(plan)
        count += 1
        same = plain.lower(plan.schedule)
        for buffer in plan.buffers:
            if buffer.name[0] in "xwd" or buffer.name in ("gathered", "packed"):
                assert buffer.dtype == given, buffer
            elif buffer.kind == "output":
                assert buffer.dtype == result, buffer
            else:  # products that travel are of the result; sums may be wider
                assert buffer.dtype in (result, dtypes.accumulator(result)), buffer
        outputs = interpret(plan, inputs_of(plan))
        wanted = interpret(same, inputs_of(same))
        assert outputs.keys() == wanted.keys()
        for key, values in wanted.items():
            np.testing.assert_array_equal(outputs[key], values)
    assert count > 3


def inputs_of(plan):
    values = np.random.default_rng(7)
    return {
        (b.rank, b.name): values.integers(-4, 5, (b.rows, b.columns)).astype(float)
        for b in plan.buffers
        if b.kind == "input"
    }


@pytest.mark.parametrize("name", [*GATHER, *SEND])
def test_bytes_travel_in_the_dtype_they_are_in(name):
    narrow = find(name).of(24, 6, 8, 3, "float8", result="float32")
    rank, schedule = 0, Schedule.parse("serial")
    moved = sum(narrow.lower(schedule).bytes_by_engine(rank).values())
    plain = sum(find(name).of(24, 6, 8, 3, "float8").lower(schedule).bytes_by_engine(rank).values())
    assert moved == plain * (1 if name in GATHER else 4)
    if name != "matmul_all_reduce":  # of few rows it shares out columns
        assert moved == sum(narrow.num_bytes(source, rank) for source in range(3))


def test_sums_over_k_grow_in_the_accumulator_of_the_result():
    def sums(result):
        op = find("all_gather_matmul").of(24, 6, 8, 3, "int8", result=result)
        plan = op.lower(Schedule.parse("uniform-fused-2d"))
        return {b.dtype for b in plan.buffers if b.name.startswith("sum")}

    assert sums("bfloat16") == {"float32"}
    assert sums("float32") == set()  # wide enough: they grow in the output
    assert sums("int8") == {"int32"}


def test_an_engine_cannot_change_a_dtype():
    plan = find("all_gather_matmul").of(24, 6, 8, 3, "bfloat16").lower(Schedule.parse("serial"))
    buffers = tuple(
        replace(b, dtype="float16") if b.name == "gathered" and b.rank == 1 else b
        for b in plan.buffers
    )
    with pytest.raises(InvalidPlan, match="cannot change their dtype"):
        verify(replace(plan, buffers=buffers))
    assert any(isinstance(task, Copy) for task in plan.tasks)


def test_a_dtype_that_is_not_there_is_refused():
    with pytest.raises(Unsupported, match="did you mean bfloat16"):
        result_dtype(find("all_gather_matmul").of(8, 8, 8, 2, "float8", result="bfloat17"))


def test_the_simulator_prices_the_bytes_of_each_buffer():
    """float8 in halves what is gathered; a wider result adds traffic where products travel."""
    machine, serial = load("mi300x"), Schedule.parse("serial@dma")

    def seconds(name, given, result=None):
        op = find(name).of(16384, 2048, 8192, 8, given, result=result)
        return run(op.lower(serial), machine).seconds

    gather = "all_gather_matmul"
    assert seconds(gather, "float8", "bfloat16") < 0.7 * seconds(gather, "bfloat16")
    send = "matmul_reduce_scatter"
    narrow, wide = seconds(send, "float8", "bfloat16"), seconds(send, "float8", "float32")
    assert 1.2 < wide / narrow < 2.0
    assert seconds(gather, "float8_e4m3fn") == seconds(gather, "float8")
