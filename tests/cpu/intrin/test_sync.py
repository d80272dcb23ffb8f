"""Intrinsics without arithmetic: atomics, futexes, prefetches, AMX, calls, bit casts."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import types

from pykernels.cpu.intrin import amx
from pykernels.cpu.intrin.prefetch import in_order, prefetch_l1, prefetch_l2
from pykernels.cpu.intrin.registers import stack_alloc
from pykernels.cpu.intrin.sync import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    call_routine,
    call_task,
    futex_wait,
    futex_wake_all,
    pause,
)
from pykernels.cpu.jit import routine, task

BIG = (5 << 40) + 7
I64 = ir.IntType(64)


def _emitted(op: Any, *operands: Any) -> str:
    """The LLVM IR of an intrinsic of integers, or of literals where these are given."""
    count = len(operands)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    for name, given in zip("abc", function.args, strict=False):
        given.name = name
    kinds = [types.intp if x is None else types.literal(x) for x in operands]
    sig, codegen = op._defn(None, *kinds)
    codegen(SimpleNamespace(get_dummy_value=lambda: None), builder, sig, function.args)
    return re.sub(r'%"(\w*)[^"]*"', r"%\1", str(module))


@pytest.mark.parametrize(
    ("op", "operands", "call"),
    [
        # A store is after all that was written before it; a load after an addition before it.
        (atomic_load, [None], "load atomic i64, i64* % seq_cst, align 8"),
        (atomic_store, 2 * [None], "store atomic i64 %b, i64* % release, align 8"),
        (atomic_add, 2 * [None], "atomicrmw add i64* %, i64 %b seq_cst"),
        (atomic_exchange, 3 * [None], "cmpxchg i64* %, i64 %b, i64 %c seq_cst seq_cst"),
        (stack_alloc, [192], "alloca [192 x i8], align 64"),
        (in_order, [], 'fence syncscope("singlethread") seq_cst'),  # no instruction
        (prefetch_l1, [None], "i32 0, i32 3, i32 1)"),
        (prefetch_l2, [None], "i32 0, i32 2, i32 1)"),
        (amx.load_config, [None], 'ldtilecfg"(i8* %)'),
        (amx.release, [], 'tilerelease"()'),
        (amx.zero, [3], 'tilezero"(i8 3)'),
        (amx.load, [4, None, None], 'tileloadd64"(i8 4, i8* %, i64 %c)'),
        (amx.store, [5, None, None], 'tilestored64"(i8 5, i8* %, i64 %c)'),
        (amx.dot_bf16, [1, 2, 3], 'tdpbf16ps"(i8 1, i8 2, i8 3)'),
        (amx.dot_i8, [1, 2, 3], 'tdpbssd"(i8 1, i8 2, i8 3)'),
    ],
)
def test_what_is_emitted(op, operands, call) -> None:
    found = _emitted(op, *operands)
    assert call in found, found


@routine(4, "sync-atomics")
def _atomics(word, which, a, b):
    if which == 0:
        return atomic_load(word)
    if which == 1:
        atomic_store(word, a)
        return 0
    if which == 2:
        return atomic_add(word, a)
    return atomic_exchange(word, a, b)


def test_atomics_act_on_64_bits() -> None:
    words = np.array([-1, BIG, -1])
    at, call = words.ctypes.data + 8, _atomics.ctypes
    assert call(at, 0, 0, 0) == BIG
    assert call(at, 2, -BIG - 9, 0) == BIG and words[1] == -9
    assert call(at, 3, BIG, 1) == -9 and words[1] == -9
    assert call(at, 3, -9, BIG) == -9 and words[1] == BIG
    call(at, 1, -BIG, 0)
    assert words.tolist() == [-1, -BIG, -1]


@routine(2, "sync-wait")
def _wait(word, seen):
    return futex_wait(word, seen)


@routine(1, "sync-wake")
def _wake(word):
    pause()
    return futex_wake_all(word)


def test_futexes_wait_unless_the_word_changed_and_wake_together() -> None:
    """They compare low halves alone."""
    words, woken = np.array([-1, 0]), list[int]()
    at = words.ctypes.data
    assert _wait.ctypes(at, 0xFFFFFFFE) == -1
    threads = [
        threading.Thread(target=lambda: woken.append(_wait.ctypes(at, 0xFFFFFFFF)), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not woken and all(thread.is_alive() for thread in threads)
    count = 0
    while count < 3:  # on a busy machine one may not wait yet
        count += _wake.ctypes(at)
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert woken == [0, 0, 0]


@task("sync-digits")
def _digits(job, index, worker):
    return 100 * job + 10 * index + worker


@routine(1, "sync-calls")
def _calls(function):
    return 1000 * call_task(function, 1, 2, 3) + call_routine(function, (4, 5, 6))


def test_calls_by_address_pass_arguments_in_order() -> None:
    assert _calls.ctypes(_digits.address) == 123456
