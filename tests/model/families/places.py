"""Where a row runs: the ref device, the CPU with each kernel, a GPU with experts on either side.

Without a GPU Triton interprets its kernels: slowly, so that few rows run there unless all are asked
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import model
from model.checkpoint.config import read_config
from model.opened import open_weights
from pykernels.registry import kernels
from pykernels.target import detect
from runtime.engine import Engine
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ...runners import CudaOptions, cuda_runner

KERNELS = tuple(each.name for each in kernels() if each.supports("bf16", detect()) is None)
"""Those that this CPU has; the first is what "auto" takes."""
CUDA = ("cuda experts cpu", "cuda experts gpu")
GPU = torch.cuda.is_available()
LENGTH, CHUNK = 192, 72
"""Tokens of a sequence, and of a step: a prompt's first chunk is longer than a page."""


@contextmanager
def engine_at(place: str, folder: Path) -> Iterator[Engine]:
    """An engine on "ref", on the CPU with one of ``KERNELS``, or on one of ``CUDA``."""
    sizes: Any = {"max_model_len": LENGTH, "max_num_batched_tokens": CHUNK, "max_num_logits": CHUNK}
    if place not in CUDA:
        where: Any = {"device": "ref"} if place == "ref" else {"kernel": place}
        with model.load_engine(folder, max_num_seqs=2, **sizes, **where) as llm:
            yield llm.engine
        return
    with WorkerPool(2 if GPU else 1, driver_works=False) as pool:
        with open_weights(folder, read_config(folder)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            where = ("cuda:0", "auto") if GPU else ("cpu", "generic")
            options = CudaOptions(experts=place.rpartition(" ")[2])
            given = LENGTH, None, CHUNK, 2, where[1], (), CHUNK, options
            runner = cuda_runner(decoder, where[0], pool, *given)
            runner.load()
        with Engine(runner) as engine:
            yield engine
