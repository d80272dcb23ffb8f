"""What a command does with an `ExecutionConfig` before torch is imported."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pykernels.registry import requested
from runtime.planning.config import CHOSEN, ExecutionConfig

from .common import prepare_threads
from .model_options import model_path
from .options import Choose

Chosen = Annotated[ExecutionConfig, Choose(but=("dual_batch",), defaults={"device": CHOSEN})]
"""Options of a command that takes what is predicted to be fastest, where they leave it open."""
Workers = Annotated[ExecutionConfig, Choose(only=("threads",))]
"""Options of a command that packs or reads matrices; ``WorkersKernel``: and computes experts."""
WorkersKernel = Annotated[ExecutionConfig, Choose(only=("threads", "kernel"))]


def opened_with(
    execution: ExecutionConfig, model: Path | None, rules: Path | None = None
) -> tuple[Path, ExecutionConfig]:
    """Where the model is (``model_path``), and the configuration as ``settled``.

    Args:
        rules: they may name a GPU where the device is the CPU; ``load_engine`` looks then.

    Raises:
        PykernelsError: a setting is for a GPU, and there is none; no such model; as ``settled``.
    """
    if rules is None:
        if execution.device == CHOSEN and not _may_have_gpu():
            execution = replace(execution, device="cpu")
        execution.check_device()
    return model_path(model), settled(execution)


def _may_have_gpu() -> bool:
    """Whether CUDA could find a GPU, as far as can be said before torch is imported."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg"))


def settled(execution: ExecutionConfig) -> ExecutionConfig:
    """The configuration with the kernel and the threads that the environment names where options
    do not; OpenMP's settings are made (``prepare_threads``).

    Raises:
        PykernelsError: no such kernel, or too many threads.
    """
    kernel, threads = requested(execution.kernel), prepare_threads(execution.threads)
    return replace(execution, kernel=kernel, threads=threads)
