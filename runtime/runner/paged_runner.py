"""A model on a device as the engine drives it: programs of a few sizes over one paged cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

import numpy as np
import torch

from pykernels.errors import PykernelsError

from ..kv_cache.layout import PAGE, CachePart
from ..passes import defer, keep_routing
from ..passes import dual_batch as in_two_lanes
from ..passes.numa import split_over_nodes
from ..planning.placement import CPU
from ..planning.step_bytes import expert_bytes, weight_bytes
from ..program import Program
from ..program.lanes import lane_tokens
from ..program.node import STEP_SIZES
from ..program.sizes import ONE_TOKEN, StepSizes
from ..program.step_inputs import IS_PROMPT
from ..program.weights import LayoutOf, WeightStore
from ..workers.pool import WorkerPool
from .active import phase
from .batch import DeviceLost, PrefillRunner, StepBatch, StepResult
from .kept_routing import KeptRouting, routed_layers
from .lane_inputs import LaneInputs
from .routing import RoutedLayer
from .sampling import SamplingInputs
from .slots import Slots

BUCKETS = 8, 64
"""Token buckets besides ``max_num_batched_tokens``: 8 = one GEMV tile, 64 = a full decode batch."""

Pass = Callable[[Program], Program]
"""Rewrites a program (``runtime.passes``)."""


class Lowerable(Protocol):
    """A model, from which programs are lowered."""

    @property
    def store(self) -> WeightStore:
        """Its weights."""

    @property
    def name(self) -> str:
        """The architecture's name."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def caches(self, pages: int) -> Mapping[str, CachePart]:
        """The cache's buffers."""

    def lower(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The program of a step of these sizes."""


class Executable(Protocol):
    """A program bound to memory."""

    @property
    def program(self) -> Program:
        """What it runs."""

    @property
    def outputs(self) -> Mapping[str, torch.Tensor]:
        """Tensors of the "output" buffers."""

    def launch(self) -> object:
        """Starts a step; what it reads stays as it is until ``result``."""

    def result(self) -> None:
        """Waits for the step's end. Raises what it failed with."""

    def run(self) -> None:
        """Both in one."""


class PagedRunner(ABC):
    """What the runners of all devices share: programs per bucket, and which one runs a batch.

    A device implements ``make_step``, which binds a program to memory, and ``layouts``, which
    says in which layout a node reads a weight; it may rewrite what is lowered (``lowered``),
    choose its ``buckets``, and have other programs for decode steps (``decode_buckets``,
    ``make_decode_step``). Programs read a batch of the runner's own, which ``launch`` brings up to
    date.

    Args:
        max_model_len: positions that the model was made for, or fewer.
        num_pages: of the cache; None: ``max_model_len`` for one sequence, and as much again.
        max_num_batched_tokens: the token budget of a step.
        max_num_logits: rows of logits of a step; None: one per sequence. Prompt logprobs take one
            per token.
        passes: rewrite the programs of decode steps, those in which every sequence has one token;
            steps with a prefill chunk run their programs as they were lowered.
        dual_batch: whether decode steps of two sequences or more have two lanes.
        deferred: experts of a token of an output that join one layer later, in steps of every kind:
            what a token is does not depend on what else is in its step.
    """

    page_size = PAGE
    buckets: Sequence[int] = BUCKETS
    decode_buckets: Sequence[int] = ()
    """Buckets of decode steps; none: those of other steps, and one program for both, unless passes
    rewrite it."""
    pool: WorkerPool | None = None
    device = torch.device("cpu")
    """Where sampling keeps what penalties go by."""
    layouts: Callable[[Program], LayoutOf]
    copies_inputs = False
    """Whether the device copies a step's inputs itself, those of lanes too."""
    routed_layers: Sequence[RoutedLayer] = ()
    slots: Slots | None = None
    """Of a device beside the CPU's experts, where what is in them changes from step to step."""
    streams = False
    """Whether experts of steps with chunks of prompts are streamed to the device."""
    prefill_runner: PrefillRunner | None = None
    """Runs long prompts beside this one's steps; its programs are among ``steps``, too."""
    late_masks = False
    """Whether masks are written while a step runs (``write_masks``)."""
    next_runs = False
    """See ``runner.batch.Runner``."""
    decisions: Sequence[str] = ()
    """What sizes and measurements have decided when the model was loaded, and why, a line each."""
    last_sizes = (0, 0)
    """T and S of the step that ended last."""

    def __init__(
        self,
        model: Lowerable,
        max_model_len: int,
        num_pages: int | None,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        passes: Sequence[Pass] = (),
        max_num_logits: int | None = None,
        dual_batch: bool = False,
        deferred: int = 0,
    ) -> None:
        self.model, self.weights, self.passes = model, model.store, tuple(passes)
        self.dual_batch, self.deferred = dual_batch, deferred
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.max_num_seqs, self.vocab_size = max_num_seqs, model.vocab_size
        self.max_num_logits = min(
            max(max_num_logits or 0, max_num_seqs), self.max_num_batched_tokens
        )
        self.num_pages = num_pages or 2 * -(-max_model_len // PAGE)
        self.steps: list[Executable] = []
        self.decode_steps: list[Executable] = []
        self.sizes = torch.zeros(len(STEP_SIZES), dtype=torch.int64, device="cpu")
        self._sequences = np.zeros(self.max_num_batched_tokens, np.int64)
        self._query_lengths = np.zeros(self.max_num_seqs, np.int64)
        self._lanes: LaneInputs | None = None
        self._batch: StepBatch  # what the device reads, while the engine writes the next
        self._executable: Executable  # of the last step
        self._running = False
        self._results: dict[int, StepResult] = {}
        self._read_bytes: dict[int, tuple[int, int]] = {}

    def lowered(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The model's program of these sizes for this device."""
        return keep_routing(self.model.lower(sizes))

    def step_sizes(self, table_pages: int = 1) -> StepSizes:
        """The largest step's, of sequences of so many pages at most."""
        tokens, logits = self.max_num_batched_tokens, self.max_num_logits
        return StepSizes(tokens, self.max_num_seqs, logits, self.num_pages, table_pages)

    def load(self) -> None:
        """Reads every weight, and makes of it what the nodes on its device read.

        Raises:
            PykernelsError: what is wrong with the weights.
        """
        program = self.lowered(self.step_sizes())
        if self.pool is not None:
            program = split_over_nodes(program, self.pool.memory)
        self.weights.load(program, self.layouts(program))

    def choose_deferred(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Sets ``deferred`` before steps are made, where a device is to measure what pays."""
        return

    def prompt_steps(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        """The steps with chunks of prompts, by size."""
        return self._bind_all(self._sizes(self.buckets), inputs, (), self.make_step)

    def before_slots(self, slots: Slots) -> None:
        """Before each step: brings the tables that it reads up to date."""
        slots.before_step()

    def make_slots(self) -> Slots | None:
        """The cache of experts, if there is one; called once, when weights are there."""
        return None

    def close(self) -> None:
        """Gives back what a device holds beside memory of its own; no step runs any more."""
        return

    @abstractmethod
    def make_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Executable:
        """The program on this device, over the runner's caches and ``sizes``."""

    def make_decode_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Executable:
        """``make_step`` where every sequence of a step has one token."""
        return self.make_step(program, inputs)

    def bind(self, batch: StepBatch) -> None:
        """Makes the programs over arrays of the runner's own, and compiles what they need."""
        batch = self._batch = batch.like()
        arrays = {
            "tokens": batch.tokens,
            "positions": batch.positions,
            IS_PROMPT: batch.is_prompt,
            "slot_mapping": batch.slot_mapping,
            "sequences": self._sequences,
            "page_table": batch.page_tables,
            "logits_indices": batch.logits_indices,
            "query_starts": batch.query_start_loc[:-1],
            "query_lengths": self._query_lengths,
            "lengths": batch.seq_lens,
            "page_rows": batch.page_table_rows,
        }
        self._sampling = SamplingInputs(batch, self.vocab_size, self.max_num_seqs, self.device)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        inputs |= self._sampling.tensors()
        if self.dual_batch and not self.copies_inputs:
            self._lanes = LaneInputs(inputs)
            inputs |= self._lanes.tensors
        self.slots = self.make_slots()
        self.choose_deferred(inputs)
        self.steps = self.prompt_steps(inputs)
        self.routed_layers = routed_layers(self.steps[0].program)
        self.decode_steps = self.steps
        buckets, make = self.decode_buckets or self.buckets, self.make_decode_step
        if self.dual_batch:  # one sequence is no two lanes, and has a program
            buckets, make = (1, *buckets), self._make_in_lanes
        if self.passes or self.dual_batch or self.decode_buckets or self.streams:
            sizes = self._sizes(buckets)
            enough = next(T for T in sizes if self.max_num_seqs <= T)
            self.decode_steps = self._bind_all(
                [T for T in sizes if T <= enough], inputs, self.passes, make
            )

    def _make_in_lanes(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Executable:
        return self.make_decode_step(in_two_lanes(program), inputs)

    def _sizes(self, buckets: Sequence[int]) -> list[int]:
        most = self.max_num_batched_tokens
        return sorted({*(T for T in buckets if T < most), most})

    def _bind_all(
        self,
        sizes: Sequence[int],
        inputs: Mapping[str, torch.Tensor],
        passes: Sequence[Pass],
        make: Callable[[Program, Mapping[str, torch.Tensor]], Executable],
    ) -> list[Executable]:
        """A step of each size; the largest first, whose memory the others may share."""
        return [self._step(T, inputs, passes, make) for T in reversed(sizes)][::-1]

    def _step(
        self,
        T: int,
        inputs: Mapping[str, torch.Tensor],
        passes: Sequence[Pass],
        make: Callable[[Program, Mapping[str, torch.Tensor]], Executable],
        lowered: Callable[..., Program] | None = None,
    ) -> Executable:
        sizes = self.step_sizes(inputs["page_table"].shape[1])
        program = (lowered or self.lowered)(sizes.of(T))
        for rewrite in passes:
            program = rewrite(program)
        program = defer(program, self.deferred)  # behind all others but lanes
        step = make(program, inputs)
        out = {name: tensor.numpy() for name, tensor in step.outputs.items()}
        if self.slots is not None:
            self.slots.add(step, step.program, out)
        self._results[id(step)] = StepResult(
            out["sampled_token_ids"],
            out["logprobs"],
            out["top_ids"],
            out["top_logprobs"],
            KeptRouting(step.program, out, self.sizes),
        )
        return step

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a one-token step reads."""
        return weight_bytes(self.decode_steps[0].program)

    def read_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of weights that the CPU reads in a decode step of so many tokens, and how many of
        them are routed experts'; see ``weight_bytes``."""
        found = self._read_bytes.get(tokens)
        if found is None:
            program = self.decode_steps[0].program
            here = CPU if any(node.device == CPU for node in program.nodes) else None
            found = weight_bytes(program, tokens, here), expert_bytes(program, tokens, here)
            self._read_bytes[tokens] = found
        return found

    def launch(self, batch: StepBatch) -> None:
        """Starts one forward step, which samples one token for each row of logits.

        Raises:
            DeviceLost: the workers have ended.
        """
        if self.pool is not None and self.pool.closed:
            raise DeviceLost("the worker pool of this model is closed", "Load the model again")
        phase("inputs")
        own = self._batch
        changed = own.version != batch.version
        batch.copy_to(own)
        if changed:
            self._arrange(own)
        self._sampling.refresh()
        if self.late_masks:  # the sampler waits; what is before it does not
            self._sampling.delay_masks()
        else:
            self._sampling.write_masks()
        if self._lanes is not None and own.T == own.S:
            self._lanes.send(own.T)
        if self.slots is not None:
            self.before_slots(self.slots)
        phase("run")
        try:
            self._executable.launch()
        except BaseException:
            self._sampling.write_masks()  # what was launched ends
            raise
        self._running = True
        if self.slots is not None:
            self.slots.plan()

    def launch_behind(self, batch: StepBatch, ends: Set[int]) -> bool:
        """See ``runner.batch.Runner``; a device whose steps cannot follow each other declines."""
        return False

    def give_up_next(self) -> None:
        """See ``runner.batch.Runner``."""
        return

    def write_masks(self) -> None:
        """See ``runner.batch.Runner``."""
        self._sampling.write_masks()

    def result(self) -> StepResult:
        """Waits for the step that was launched.

        Raises:
            DeviceLost: the device works no more.
            TaskError: a task failed.
        """
        assert self._running, "no step was launched"
        self._running = False
        self._executable.result()
        self.last_sizes = self._batch.T, self._batch.S
        if self.slots is not None:
            own = self._batch
            self.slots.ended(self._executable, self.sizes.tolist(), own.T == own.S)
        return self._results[id(self._executable)]

    # Where the model was loaded in it, tensors can be changed in it only.
    @torch.inference_mode()
    def _arrange(self, batch: StepBatch) -> None:
        """Which program runs, which sequence each token is of, how each row is sampled."""
        T, S, R = batch.T, batch.S, batch.R
        if self.max_num_batched_tokens < T or self.max_num_seqs < S or self.max_num_logits < R:
            raise PykernelsError(
                f"a step of {T} tokens of {S} sequences, {R} rows of logits", "Make a larger runner"
            )
        self.sizes[:] = torch.tensor((T, S, R, *lane_tokens(T)), dtype=torch.int64, device="cpu")
        counts = self._query_lengths[:S]
        counts[:] = np.diff(batch.query_start_loc[: S + 1])
        self._sequences[:T] = np.repeat(batch.page_table_rows[:S], counts)
        self._sampling.arrange(batch.sampling[:R])
        steps = self.decode_steps if T == S else self.steps
        self._executable = next(step for step in steps if T <= step.program.sizes["T"])
