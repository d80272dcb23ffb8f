"""How a model runs on a machine, as data: what ``compile`` makes programs by.

A plan holds decisions and nothing that runs: no weight, no device, no clock. It follows from a
model's sizes, the machine and what the user asks for. What it leaves open is measured by
calibration, once weights are there; rates make the finished plan of it (``gpu.with_rates``), by
which runners are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ..experts.cache import CachePolicy
from ..kv_cache.layout import PAGE
from ..machine.nodes import ONE_NODE, MemoryNodes
from ..program import Program
from ..program.sizes import ONE_TOKEN, StepSizes
from .lowerable import Lowerable, Pass
from .placement import Placement
from .prompt_sizes import PromptSizes
from .streaming import Streaming

BUCKETS = 8, 64
"""Tokens of steps: 8 = one GEMV tile, 64 = a full decode batch."""


class Phase(StrEnum):
    """What a step is for, by which its passes are chosen."""

    DECODE = "decode"
    """No sequence has more than one token."""
    PROMPT = "prompt"
    """The step has chunks of prompts, or drafts; experts are computed where they lie."""
    STREAMED = "streamed"
    """The step has chunks of prompts, and all experts cross to a GPU (OSDI'26 3.1)."""
    SPLIT = "split"
    """The step has chunks of prompts, and a share of the experts crosses (SMOE, Algorithm 1)."""


@dataclass(frozen=True)
class Step:
    """Which step a program is made for.

    Attributes:
        tokens: T, its most.
        share: of each layer's experts, those that cross in a split step.
    """

    phase: Phase
    tokens: int = 1
    share: float = 0.0


@dataclass(frozen=True)
class ExecutionPlan:
    """How a model's steps run.

    Attributes:
        sizes: of the largest step, and of the cache.
        placement: the device of every node, and where each weight lies.
        deferred: experts of a token of an output that join one layer later (SOSP'25 4.1).
        dual_batch: whether decode steps of two sequences or more have two microbatches (OSDI'26
            3.3.1).
        streaming: how experts cross in steps that stream or split them; None: none do.
        routes: by name, the GPUs to which prompts may be streamed other than the one that decodes;
            none: to the GPUs of the layers. ``stream_over``: those of the route that is taken.
        tensor: GPUs that have a part of each layer's heads, MLPs and experts; none: no layer is
            parted. ``one_shot``: most numbers of each that they add up without channels.
        nodes: NUMA nodes of the CPU's workers; each has a slice of every matrix.
        passes: of the user, for decode steps.
        max_model_len: positions that the model was made for, or fewer.
        kernel: a backend of ``pykernels.registry``, or "auto".
        prefill: by which ways experts on the CPU may be computed for prompts: "cpu", "stream",
            "split", or "auto": as rates say.
        prompts: sizes of the steps of prompts by the way of their experts; None: those of
            ``buckets``, all one way.
        buckets: tokens of steps besides ``sizes.tokens``; ``decode_buckets``: of decode steps;
            none: the same, and one program for both, unless passes tell them apart.
        policy: by which experts in slots change.
        kv_attention: "cpu": decode steps attend there in layers whose keys and values lie in main
            memory; "gpu": to which these cross.
        gpu_gib: GiB that may be taken of each GPU; None: all that is free.
        chooses_deferral: whether ``deferred`` is yet to be chosen by the machine's rates
            (``devices.sim.deferral``).
        measures_kv: whether ``kv_attention`` is yet to become what is faster, as measured;
            ``measures_prompts``: likewise ``streaming`` and ``prompts``, which experts can be
            pinned and what is fast.
        decisions: what sizes and measurements have decided, and why, a line each.
    """

    sizes: StepSizes = ONE_TOKEN
    placement: Placement = Placement()  # noqa: RUF009 - frozen
    deferred: int = 0
    dual_batch: bool = False
    streaming: Streaming | None = None
    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stream_over: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    one_shot: int = 0
    nodes: MemoryNodes = ONE_NODE
    passes: tuple[Pass, ...] = ()
    max_model_len: int = 1
    kernel: str = "auto"
    prefill: str = "cpu"
    prompts: PromptSizes | None = None
    buckets: tuple[int, ...] = BUCKETS
    decode_buckets: tuple[int, ...] = ()
    policy: CachePolicy | None = None
    kv_attention: str = "gpu"
    gpu_gib: float | None = None
    chooses_deferral: bool = False
    measures_kv: bool = False
    measures_prompts: bool = False
    decisions: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether something is to be chosen or measured before a runner can be made."""
        return self.chooses_deferral or self.measures_kv or self.measures_prompts

    def prompt_steps(self) -> tuple[Step, ...]:
        """Those with chunks of prompts, way by way, by size."""
        if self.prompts is None:
            phase = Phase.PROMPT if self.streaming is None else Phase.STREAMED
            return tuple(Step(phase, T) for T in self._up_to_most(self.buckets))
        sizes = self.prompts
        return (
            *(Step(Phase.PROMPT, T) for T in sizes.by_cpu),
            *(Step(Phase.SPLIT, *each) for each in zip(sizes.split, sizes.shares, strict=True)),
            *(Step(Phase.STREAMED, T) for T in sizes.streamed),
        )

    def decode_steps(self) -> tuple[Step, ...]:
        """Those in which no sequence has more than one token, by size; none: the others are theirs,
        too."""
        if not (self.passes or self.dual_batch or self.streaming or self.decode_buckets):
            return ()
        buckets = self.decode_buckets or self.buckets
        if self.dual_batch:  # one sequence is no two microbatches, and has a program
            buckets = (1, *buckets)
        sizes = self._up_to_most(buckets)
        enough = next(T for T in sizes if self.sizes.sequences <= T)
        return tuple(Step(Phase.DECODE, T) for T in sizes if enough >= T)

    def _up_to_most(self, buckets: tuple[int, ...]) -> list[int]:
        most = self.sizes.tokens
        return sorted({*(T for T in buckets if most > T), most})

    def streams_all(self, program: Program) -> bool:
        """Whether streamed steps leave no experts to the CPU, and so need none of its workers.

        Args:
            program: any of the model's.
        """
        return self.streaming is not None and self.streaming.streams_all(program)

    def streams_apart(self, program: Program, model: Lowerable) -> bool:
        """Whether streamed steps run beside those that decode, in memory of their own. States are
        copied between steps, so a model that has some runs one step at a time.

        Args:
            program: any of the model's.
        """
        return self.streams_all(program) and not model.states


def largest_step(
    max_model_len: int,
    num_pages: int | None = None,
    max_num_batched_tokens: int | None = 512,
    max_num_seqs: int = 16,
    max_num_logits: int | None = None,
    state_slots: int | None = None,
    window_pages: int = 0,
) -> StepSizes:
    """The sizes of a runner's largest step.

    Args:
        max_model_len: positions of a sequence.
        num_pages: of the cache; None: ``max_model_len`` for one sequence, and as much again.
        max_num_batched_tokens: the token budget of a step, which has ``max_num_seqs`` at least;
            None: 0 tokens, for a plan that chooses them.
        max_num_logits: rows of logits of a step; None: one per sequence. Prompt logprobs take one
            per token.
        state_slots: of states, if layers have some; None: one a sequence, and as many for
            snapshots.
        window_pages: of layers with a window, see ``kv_cache.windows.pool_pages``; 0: they have
            ``num_pages`` like the others.
    """
    table_pages, logits = -(-max_model_len // PAGE), max(max_num_logits or 0, max_num_seqs)
    pages, slots = num_pages or 2 * table_pages, state_slots or 2 * max_num_seqs
    sizes = StepSizes(0, max_num_seqs, logits, pages, table_pages, slots, window_pages)
    if max_num_batched_tokens is None:
        return sizes
    return sizes.of(max(max_num_batched_tokens, max_num_seqs))
