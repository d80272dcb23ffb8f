"""Our engine over a model to be timed: a checkpoint, or random weights of a well-known shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from transformers import PretrainedConfig

import model
from model.architectures.decoder import Decoder
from model.checkpoint.config import EXPERT_COUNTS
from model.hub import name_of
from model.modules.recognise import experts_per_token
from model.named import make_config
from model.pinning.place import placement_of
from model.random_model import check_memory, random_decoder
from pykernels.errors import PykernelsError
from pykernels.registry import resolve
from pykernels.target import detect
from runtime.engine.scheduling.config import STEP_TOKENS
from runtime.make_runner import make_plan, make_runner
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import ExecutionPlan, largest_step
from runtime.planning.residency import Filled
from runtime.profiling.engine_speed import EngineTimer, Load, StepTime, decode_speed
from runtime.profiling.roofline import read_roof
from runtime.profiling.this_machine import this_machine
from runtime.runner.paged_runner import PagedRunner
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool, make_pool
from runtime.workers.threads import spin_budget

from .kv import kv_figures


@dataclass(frozen=True)
class Shape:
    """A well-known architecture, or a part of it; None: as it is.

    Attributes:
        arch: of ``model.named.ARCHS``.
        layers, experts, vocab: in place of its own.
        positions: at least so many, whatever it was made for.
    """

    arch: str
    layers: int | None = None
    experts: int | None = None
    vocab: int | None = None
    positions: int = 1

    def config(self) -> PretrainedConfig:
        """Its configuration.

        Raises:
            PykernelsError: there is none of that name, or a token takes more experts than it has.
        """
        config = make_config(self.arch, num_hidden_layers=self.layers, vocab_size=self.vocab)
        own = config.max_position_embeddings
        config.max_position_embeddings = max(own, self.positions)
        if self.experts is not None:
            if self.experts < (topk := experts_per_token(config)):
                raise PykernelsError(
                    f"{self.experts} experts, of which a token takes {topk}",
                    f"Give --experts {topk} or more",
                )
            name = next(name for name in EXPERT_COUNTS if hasattr(config, name))
            setattr(config, name, self.experts)
        return config


class Ours:
    """A packed model and its workers.

    Attributes:
        name: of the checkpoint's folder or the architecture; ``fmt``: of its experts.
        layers: how many; ``max_model_len``: positions that it was made for.
        load_seconds: reading or filling, and packing.
        settings: options that make a sequence shorter, for who asks for more positions.
    """

    settings = "--context, --prompt or --tokens"

    def __init__(
        self, name: str, decoder: Decoder, pool: WorkerPool, max_model_len: int, seconds: float
    ) -> None:
        self.name, self.decoder, self.pool = name, decoder, pool
        self.layers, self.max_model_len = len(decoder.layers), max_model_len
        self.load_seconds = round(seconds, 2)
        self.fmt, self.activations = _experts(decoder)

    @classmethod
    def random(
        cls, shape: Shape, fmt: str, execution: ExecutionConfig, activations: str = "bf16"
    ) -> Ours:
        """Random weights.

        Raises:
            PykernelsError: no memory for them, a format or a kernel that there is not.
        """
        kernel = execution.kernel
        resolve(kernel, fmt, detect(), activations)
        config = shape.config()
        check_memory(shape.arch, config, fmt)
        pool = make_pool(execution.threads, numa=execution.numa)
        try:
            start = time.perf_counter()
            pack, nodes = packer(pool), pool.memory
            decoder = random_decoder(config, fmt, pack, kernel, activations, nodes)
            decoder = replace(decoder, kv_dtype=execution.kv_dtype)
            took = time.perf_counter() - start
            return cls(shape.arch, decoder, pool, config.max_position_embeddings, took)
        except BaseException:
            pool.close()
            raise

    @classmethod
    def checkpoint(cls, folder: str | Path, execution: ExecutionConfig) -> Ours:
        """A checkpoint. Raises what ``model.load_engine`` does."""
        start = time.perf_counter()
        loaded = model.load_engine(
            folder,
            device="cpu",
            threads=execution.threads,
            kernel=execution.kernel,
            kv_dtype=execution.kv_dtype,
            numa=execution.numa,
            max_model_len=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
        )
        took = time.perf_counter() - start
        positions = loaded.config.max_position_embeddings
        name = "embedded" if Path(folder) == Path(model.EMBEDDED) else name_of(Path(folder))
        return cls(name, loaded.runner.model, loaded.pool, positions, took)  # type: ignore[arg-type]

    def timer(
        self,
        load: Load,
        execution: ExecutionConfig,
        max_num_batched_tokens: int | None = None,
        target_itl_ms: float | None = None,
    ) -> EngineTimer:
        """An engine with room for a load.

        Args:
            execution: as of ``load_engine``, on this model's workers.
            max_num_batched_tokens: of a step; None: as ``EngineConfig`` has it.
            target_itl_ms: of ``EngineConfig``.

        Raises:
            PykernelsError: more positions than the model has, or no memory for the cache.
        """
        runner = self.runner(load, execution, max_num_batched_tokens)
        return EngineTimer(runner, target_itl_ms=target_itl_ms)

    def runner(
        self,
        load: Load,
        execution: ExecutionConfig,
        max_num_batched_tokens: int | None = None,
        change: Callable[[ExecutionPlan], ExecutionPlan] = lambda plan: plan,
    ) -> PagedRunner:
        """What an engine with room for a load runs. Other arguments and errors are ``timer``'s.

        Args:
            change: of the plan, to what no user can ask for.
        """
        budget = max(max_num_batched_tokens or STEP_TOKENS, load.batch)
        if (positions := load.positions(budget)) > self.max_model_len:
            raise PykernelsError(
                f"a sequence of {positions} tokens; {self.name} has {self.max_model_len} positions",
                f"Give a smaller {self.settings}",
            )
        pages, batch = load.pages(budget), load.batch
        largest = largest_step(positions, pages, budget, batch)
        placement = placement_of(execution, self.decoder, largest)
        sizes = largest
        if execution.on_gpu and not max_num_batched_tokens:  # as many tokens as pay there
            sizes = largest_step(positions, pages, None, batch)
        plan = make_plan(execution, self.decoder, positions, sizes, placement, rates=this_machine)
        runner = make_runner(change(plan), execution.device, self.decoder, self.pool)
        start = time.perf_counter()
        spin(self.pool, "cpu")  # not while they pack
        runner.load()
        self.load_seconds = round(self.load_seconds + time.perf_counter() - start, 2)
        return runner.finished()

    def thinned(self, layers: int) -> Ours:
        """The same with the first ``layers`` of its layers, over the same workers.

        Raises:
            PykernelsError: it has fewer, or none of these has routed experts.
        """
        some = self.decoder.layers[:layers]
        if len(some) < layers or not any(layer.moe for layer in some):
            raise PykernelsError(
                f"{self.name} with {self.layers} layers has no {layers} with routed experts",
                "Give another number of layers",
            )
        decoder = replace(self.decoder, layers=some)
        return Ours(self.name, decoder, self.pool, self.max_model_len, self.load_seconds)

    def backend(self, kernel: str) -> str:
        """The kernel that "auto" stands for."""
        return resolve(kernel, self.fmt, detect(), self.activations).name

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()


def measure(
    ours: Ours, load: Load, execution: ExecutionConfig, rounds: int = 3
) -> dict[str, float]:
    """The speed of prompts and of decode steps, the roof taken before and after, and the seconds
    that compiling and warming up took."""
    start, threads = time.perf_counter(), execution.threads
    timer = ours.timer(load, execution)
    try:
        timer.prefill(load.prompt)
        timer.decode(load.batch, min(load.context, 64), 4)
        warmup = time.perf_counter() - start
        roofs = [roof(threads)]
        prompts: list[float] = []
        steps: list[StepTime] = []
        for _ in range(rounds):
            prompts.append(timer.prefill(load.prompt))
            steps += timer.decode(load.batch, load.context, load.tokens)
        roofs.append(roof(threads))
        program = timer.runner.decode_steps[0].program
        figures = decode_speed(steps, program, load.batch, ours.layers, mean(roofs))
        return {
            "prefill_tok_s": round(load.prompt / median(prompts), 2),
            **asdict(figures),
            "lanes": 2 if load.batch > 1 and timer.runner.dual_batch else 1,
            "cached_experts": sum(map(len, timer.runner.plan.placement.gpu_experts_of.values())),
            **cache_figures(timer.runner),
            "staged_gib": staged_gib(timer.runner),
            **kv_figures(timer.runner, load, figures.us_per_step),
            "deferred": timer.runner.deferred,
            "warmup_seconds": round(warmup, 2),
        }
    finally:
        timer.close()
        timer.runner.close()


def spin(pool: WorkerPool, device: str) -> None:
    """Idle workers spin from now on as long as an engine of that device wants it: they may have
    served another one before."""
    pool.spin_for(spin_budget(pool.driver_works and device == "cpu"))


def staged_gib(runner: PagedRunner) -> float:
    """GiB of dense weights that cross to a GPU in each step."""
    crossing = runner.plan.placement.filled(Filled.EACH_STEP)
    return round(sum(each.nbytes for each in crossing.values()) / 2**30, 3)


def cache_figures(runner: PagedRunner) -> dict[str, float]:
    """What an expert cache did, if there is one."""
    if runner.expert_slots is None:
        return {}
    stats, slots = (
        runner.expert_slots.stats,
        sum(spec.shape[0] for spec in runner.expert_slots.specs),
    )
    return {"cache_slots": slots, "cache_hit_rate": round(stats.hit_rate, 4)}


def roof(threads: int | None) -> float:
    """GB/s that so many threads read now; those of the ring sleep meanwhile."""
    pool = make_pool(threads)
    try:
        return read_roof(pool)
    finally:
        pool.close()


def _experts(decoder: Decoder) -> tuple[str, str]:
    """Format and activations of the first routed experts."""
    for layer in decoder.layers:
        if layer.moe is not None:
            return layer.moe.experts.fmt, layer.moe.activations
    return decoder.head.fmt, "bf16"
