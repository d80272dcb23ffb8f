"""The runner of a model on the device that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .devices.cpu.runner import CpuRunner
from .devices.ref.runner import RefRunner
from .engine.scheduling.config import STEP_TOKENS
from .planning.config import ExecutionConfig
from .planning.placement import CPU, Placement
from .runner.paged_runner import Lowerable, PagedRunner, Pass
from .workers.pool import WorkerPool


class RunnerSizes(NamedTuple):
    """What a runner is made for.

    Attributes:
        max_model_len: positions of a sequence.
        num_pages: of the cache; None: ``max_model_len`` for one sequence, and as much again.
        max_num_batched_tokens: of a step; None: ``STEP_TOKENS``, or what a GPU takes at best.
        max_num_seqs: of a step; ``max_num_logits``: rows of logits, None: one per sequence.
    """

    max_model_len: int
    num_pages: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 16
    max_num_logits: int | None = None


def make_runner(
    *,
    config: ExecutionConfig,
    model: Lowerable,
    pool: WorkerPool,
    sizes: RunnerSizes,
    placement: Placement,
    passes: Sequence[Pass] = (),
) -> PagedRunner:
    """A runner that is not loaded yet.

    Args:
        placement: of the model's nodes and experts; of ``config`` what was decided about them.
        passes: of the user, for the programs of decode steps.

    Raises:
        PykernelsError: as the runner of that device.
    """
    longest, pages, tokens, seqs, logits = sizes
    if config.on_gpu:
        from .devices.cuda.runner import CudaOptions, CudaRunner

        options = CudaOptions(
            experts="cpu" if placement.experts == CPU else "gpu",
            deferred=None if config.defer == "auto" else config.deferred,
            dual_batch=config.dual_batch,
            placed=placement.placed,
            gpu_experts=placement.cached,
            by_layer=placement.by_layer or None,
            prefill=config.prefill,
            slots=placement.slots,
            policy=config.cache_policy,
            staged=placement.staged,
        )
        return CudaRunner(
            model,
            config.device,
            pool,
            longest,
            pages,
            tokens,
            seqs,
            kernel=config.kernel,
            passes=passes,
            max_num_logits=logits,
            options=options,
        )
    at_most = longest, pages, tokens or STEP_TOKENS, seqs
    if config.device == CPU:
        return CpuRunner(
            model,
            pool,
            *at_most,
            kernel=config.kernel,
            passes=passes,
            max_num_logits=logits,
            deferred=config.deferred,
        )
    return RefRunner(
        model,
        *at_most,
        passes=passes,
        pool=pool,
        max_num_logits=logits,
        dual_batch=config.dual_batch is True,
        prefill=config.prefill,
        slots=placement.slots,
        policy=config.cache_policy,
        deferred=config.deferred,
    )
