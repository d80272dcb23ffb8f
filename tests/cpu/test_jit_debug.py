"""Looking into a kernel: what it prints and raises comes through, and the debug mode."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from numba import carray, types

from pykernels.cpu.intrin.sync import as_pointer
from pykernels.cpu.jit import inlined, routine, task
from pykernels.env import env
from runtime.workers.job import Job, Jobs
from runtime.workers.pool import TaskError, WorkerPool


def test_what_a_routine_prints_is_printed_when_it_was_just_compiled(tmp_path, capsys) -> None:
    @inlined
    def show(x):
        print("inside", x)

    with env.override(cache_dir=tmp_path):

        @routine(1, "prints")
        def prints(x):
            print("outside", x)
            show(x + 1)
            return x

    # With the GIL: a print that failed to give it back would stop this process otherwise.
    assert ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(prints.address)(3) == 3
    assert capsys.readouterr().out == "outside 3\ninside 4\n"


def test_the_debug_mode_runs_one_thread_and_names_an_index_out_of_bounds(tmp_path) -> None:
    with env.override(debug=True, cache_dir=tmp_path):

        @task("reads-behind")
        def reads_behind(address, index, worker):
            return carray(as_pointer(address), (2,), types.int64)[index]

        words = np.zeros(4, np.int64)
        with WorkerPool() as pool:
            assert pool.threads == 1
            job = Job("reads", reads_behind.address, words.ctypes.data, tasks=3, after=0)
            with pytest.raises(TaskError, match="^task 2 of reads raised IndexError: "):
                pool.run(Jobs([job]))
    assert not [*tmp_path.rglob("*.nb*")]


def test_numba_without_its_compiler_is_refused_with_what_to_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import pykernels.cpu"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert "NUMBA_DISABLE_JIT=1 cannot be used" in last and "PYKERNELS_DEBUG=1" in last
