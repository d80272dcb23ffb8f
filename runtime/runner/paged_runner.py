"""A model on a device as the engine drives it: programs of a few sizes over one paged cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pykernels.errors import PykernelsError

from ..kv_cache.layout import PAGE
from ..kv_cache.page_store import HostPages, PageStore
from ..planning.compile import Compiled, compile
from ..planning.drafts import BatchInvariance, why_no_drafts
from ..planning.execution import ExecutionPlan, Phase, Step
from ..planning.lowerable import Lowerable
from ..planning.placement import CPU
from ..planning.work import expert_bytes, weight_bytes
from ..program import Program
from ..program.node import STEP_SIZES
from ..program.sizes import microbatch_tokens
from ..program.step_inputs import (
    HAS_STATE,
    HEAD_LENGTHS,
    IS_PROMPT,
    SAVED_SLOTS,
    STATE_SLOTS,
    TAIL_LENGTHS,
    TAIL_STARTS,
    WINDOW_SLOTS,
    WINDOW_TABLE,
)
from ..program.weights import LayoutOf
from ..workers.pool import WorkerPool
from .active import phase
from .batch import DeviceLost, PrefillRunner, StepBatch, StepResult
from .expert_slots import ExpertSlots
from .kept_routing import KeptRouting, routed_layers
from .microbatch_inputs import MicrobatchInputs
from .routing import RoutedLayer
from .sampling import SamplingBatch


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


class LastStep(NamedTuple):
    """A step that has ended."""

    T: int
    """Its tokens."""
    S: int
    """Its sequences."""
    decode: bool
    """Whether all of them decode: none reads its prompt."""
    program: Program
    """What ran."""


class PagedRunner(ABC):
    """What the runners of all devices share: programs per bucket, and which one runs a batch.

    A device implements ``make_step``, which binds what was compiled to memory, and ``layouts``,
    which says in which layout a node reads a weight. Which programs there are says the plan;
    programs read a batch of the runner's own, which ``launch`` brings up to date.

    Attributes:
        plan: how the model runs; while it is open, weights are loaded by it and nothing else.
    """

    page_size = PAGE
    pool: WorkerPool | None = None
    device = torch.device("cpu")
    """Where sampling keeps what penalties go by."""
    layouts: Callable[[Program], LayoutOf]
    copies_inputs = False
    """Whether the device copies a step's inputs itself, those of microbatches too."""
    routed_layers: Sequence[RoutedLayer] = ()
    expert_slots: ExpertSlots | None = None
    """Expert slots of the GPU that change between steps, or None."""
    prefill_runner: PrefillRunner | None = None
    """Runs long prompts beside this one's steps; its programs are among ``steps``, too."""
    streams_from = 0
    """See ``runner.batch.Runner``."""
    saves_states = False
    """See ``runner.batch.Runner``."""
    late_masks = False
    """Whether masks are written while a step runs (``write_masks``)."""
    next_runs = False
    """See ``runner.batch.Runner``."""
    decodes = True
    """Whether it binds the plan's programs of decode steps."""
    caches: dict[str, torch.Tensor]
    """Tensors of the "cache" buffers by name."""
    decode_queries = 1
    """Tokens of a sequence that programs of decode steps take; steps in which any has more run
    those of prompts."""

    def __init__(self, model: Lowerable, plan: ExecutionPlan) -> None:
        self.model, self.weights, self.plan = model, model.store, plan
        self.max_model_len, self.vocab_size = plan.max_model_len, model.vocab_size
        sizes = plan.sizes
        self.max_num_batched_tokens, self.max_num_seqs = sizes.tokens, sizes.sequences
        self.max_num_logits, self.num_pages = sizes.logits, sizes.pages
        self.state_slots = sizes.state_slots if model.states else 0
        self.window_pages, self.window = sizes.window_pages, model.window
        self.last_steps: deque[LastStep] = deque(maxlen=1)  # shared with who runs beside
        self.steps: list[Executable] = []
        self.decode_steps: list[Executable] = []
        self.sizes = torch.zeros(len(STEP_SIZES), dtype=torch.int64, device="cpu")
        self._sequences = np.zeros(self.max_num_batched_tokens, np.int64)
        self._query_lengths = np.zeros(self.max_num_seqs, np.int64)
        self._has_state = np.zeros(self.max_num_seqs, np.int64)
        self._head_lengths, self._tail_starts = np.zeros((2, self.max_num_seqs), np.int64)
        self._microbatches: MicrobatchInputs | None = None
        self._batch: StepBatch  # what the device reads, while the engine writes the next
        self._executable: Executable  # of the last step
        self._running = False
        self._results: dict[int, StepResult] = {}
        self._read_bytes: dict[int, tuple[int, int]] = {}

    @property
    def last_step(self) -> LastStep | None:
        """The step that ended last."""
        return self.last_steps[-1] if self.last_steps else None

    @cached_property
    def least_seconds(self) -> float:
        """Those in which all experts cross, to each GPU its own; 0: no link was measured."""
        streaming = self.plan.streaming
        if streaming is None:
            return 0.0
        return streaming.seconds(self.compiled().program, self.plan.stream_over)

    @property
    def why_no_drafts(self) -> str:
        """See ``runner.batch.Runner``."""
        return why_no_drafts(self.plan, self.model)

    @property
    def batch_invariance(self) -> BatchInvariance:
        """Up to how many tokens of a step each one is computed as it would be alone."""
        return BatchInvariance()

    @property
    def deferred(self) -> int:
        """Experts of a token of an output that join one layer later."""
        return self.plan.deferred

    @property
    def decisions(self) -> Sequence[str]:
        """What sizes and measurements have decided, and why, a line each."""
        return self.plan.decisions

    @property
    def dual_batch(self) -> bool:
        """Whether decode steps of two sequences or more have two microbatches."""
        return self.plan.dual_batch

    def compiled(self, phase: Phase = Phase.PROMPT, tokens: int = 1, share: float = 0) -> Compiled:
        """See ``planning.compile``."""
        return compile(self.model, self.plan, phase, tokens, share)

    def load(self) -> None:
        """Reads every weight, and makes of it what the nodes on its device read.

        Raises:
            PykernelsError: what is wrong with the weights.
        """
        parts = self.compiled(tokens=self.max_num_batched_tokens).parts.values()
        self.weights.load(*((part, self.layouts(part)) for part in parts))

    def finished(self) -> PagedRunner:
        """The runner of the finished plan over the same memory: this one, unless its plan leaves
        something open, which is measured then. Weights are loaded.

        Raises:
            PykernelsError: what was asked for cannot be.
        """
        return self

    def bind_prompts(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        """The plan's steps with chunks of prompts, by size."""
        return self.bind_steps(self.plan.prompt_steps(), inputs)

    def update_expert_slots(self, slots: ExpertSlots) -> None:
        """Before each step: brings the tables that it reads up to date."""
        slots.before_step()

    # Where the model was loaded in it, tensors can be changed in it only.
    @torch.inference_mode()
    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """See ``runner.batch.Runner``."""
        for name in self.model.states:
            state = self.caches[name]
            for source, target in copies:
                state[target] = state[source]

    def page_store(self) -> PageStore:
        """The cache as bytes, once the runner is bound."""
        names = self.model.caches(1)
        return HostPages({name: self.caches[name] for name in names}, self.model.states)

    def make_expert_slots(self) -> ExpertSlots | None:
        """The cache of experts, if there is one; called once, when weights are there."""
        return None

    def close(self) -> None:
        """Gives back what a device holds beside memory of its own; no step runs any more."""
        return

    @abstractmethod
    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> Executable:
        """What was compiled on this device, over the runner's caches and ``sizes``."""

    def host_inputs(self, batch: StepBatch) -> dict[str, torch.Tensor]:
        """By name, what programs read: arrays of the runner's own, of the sizes of a batch."""
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
            STATE_SLOTS: batch.state_slots,
            HAS_STATE: self._has_state,
            HEAD_LENGTHS: self._head_lengths,
            TAIL_STARTS: self._tail_starts,
            TAIL_LENGTHS: batch.tails,
            SAVED_SLOTS: batch.saved_slots,
        }
        if batch.window_tables is not None and batch.window_slots is not None:
            arrays |= {WINDOW_TABLE: batch.window_tables, WINDOW_SLOTS: batch.window_slots}
        self._sampling = SamplingBatch(batch, self.vocab_size, self.max_num_seqs, self.device)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        inputs |= self._sampling.tensors()
        if self.dual_batch and not self.copies_inputs:
            self._microbatches = MicrobatchInputs(inputs)
            inputs |= self._microbatches.tensors
        return inputs

    def bind(self, batch: StepBatch) -> None:
        """Makes the programs over arrays of the runner's own, and compiles what they need."""
        assert not self.plan.is_open, "take the finished() runner"
        inputs = self.host_inputs(batch)
        self.expert_slots = self.make_expert_slots()
        self.steps = self.bind_prompts(inputs)
        self.routed_layers = routed_layers(self.steps[0].program)
        steps = self.plan.decode_steps() if self.decodes else ()
        self.decode_steps = self.bind_steps(steps, inputs) or self.steps

    def bind_steps(
        self, steps: Sequence[Step], inputs: Mapping[str, torch.Tensor]
    ) -> list[Executable]:
        """These steps; the largest first, whose memory the others may share."""
        compiled = (self.compiled(s.phase, s.tokens, s.share) for s in reversed(steps))
        return [self._step(each, inputs) for each in compiled][::-1]

    def _step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> Executable:
        step = self.make_step(compiled, inputs)
        out = {name: tensor.numpy() for name, tensor in step.outputs.items()}
        if self.expert_slots is not None:
            self.expert_slots.add(step, step.program, out)
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
        known = self._read_bytes.get(tokens)
        if known is None:
            program = self.decode_steps[0].program
            here = CPU if any(node.device == CPU for node in program.nodes) else None
            known = weight_bytes(program, tokens, here), expert_bytes(program, tokens, here)
            self._read_bytes[tokens] = known
        return known

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
        if self._microbatches is not None and self._takes_decode(own):
            self._microbatches.send(own.T)
        if self.expert_slots is not None:
            self.update_expert_slots(self.expert_slots)
        phase("run")
        try:
            self._executable.launch()
        except BaseException:
            self._sampling.write_masks()  # what was launched ends
            raise
        self._running = True
        if self.expert_slots is not None:
            self.expert_slots.plan()

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
        own = self._batch
        last = LastStep(own.T, own.S, own.D == own.S, self._executable.program)
        self.last_steps.append(last)
        if self.expert_slots is not None:
            self.expert_slots.ended(self._executable, self.sizes.tolist(), own.D == own.S)
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
        self.sizes[:] = torch.tensor(
            (T, S, R, *microbatch_tokens(T)), dtype=torch.int64, device="cpu"
        )
        counts = self._query_lengths[:S]
        counts[:] = batch.num_scheduled
        # The same as long as the version is: only a prompt starts from nothing.
        self._has_state[:S] = batch.seq_lens[:S] > counts
        self._head_lengths[:S] = counts - batch.tails[:S]
        self._tail_starts[:S] = batch.query_start_loc[1 : S + 1] - batch.tails[:S]
        self._sequences[:T] = np.repeat(batch.page_table_rows[:S], counts)
        self._sampling.arrange(batch.sampling[:R])
        steps = self.decode_steps if self._takes_decode(batch) else self.steps
        self._executable = next(step for step in steps if T <= step.program.sizes["T"])

    def _takes_decode(self, batch: StepBatch) -> bool:
        """Whether a step runs a program of decode steps."""
        most = self._query_lengths[: batch.S].max(initial=0)
        return bool(most <= self.decode_queries)
