"""What the HTTP side asks of a model, wherever its engine runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from runtime.engine import AsyncRequestHandle, EngineStats, SamplingParams
from runtime.engine.pace import Speed
from runtime.kv_cache.prefix import Held
from runtime.kv_tiers.transfer.endpoint import Peer
from runtime.runner.routing import RoutedLayer

from ...text.settings import EngineSettings


@dataclass(frozen=True)
class ConfigFacts:
    """What texts need to know of a model's config."""

    model_type: str
    bos_token_id: int | None


@dataclass(frozen=True)
class DevicePart:
    """What one device computes of a model.

    Attributes:
        device: "cpu", "cuda:0".
        layers: decoder layers of which it computes something.
        expert_layers: those whose routed experts it computes, all or the ones that it has.
        slots: places for experts that change from step to step, all layers together; ``pinned``:
            experts that it has for good beside those of the CPU.
    """

    device: str
    layers: tuple[int, ...]
    expert_layers: tuple[int, ...]
    slots: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What stays as it is while a model is served.

    Attributes:
        settings: of its generation config.
        longest: most tokens of a prompt and its output.
        max_num_seqs: outputs that run at once.
        ageing_seconds: see ``EngineConfig``.
        num_pages, page_size: of the KV cache.
        routed_layers: those that choose experts.
        kv_model: what tells pages of its KV cache from those of another model, if they are shared.
        ways: by which its pages go to other engines; ``peer``: where these find them in memory.
        workers: threads on the CPU; ``devices``: their names; ``parts``: what each computes.
    """

    config: ConfigFacts
    settings: EngineSettings
    longest: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_num_seqs: int
    ageing_seconds: float
    num_pages: int
    page_size: int
    routed_layers: tuple[RoutedLayer, ...]
    workers: int
    devices: tuple[str, ...]
    parts: tuple[DevicePart, ...] = ()
    kv_model: str = ""
    ways: tuple[str, ...] = ()
    peer: Peer | None = None


@dataclass(frozen=True)
class NodeFigures:
    """A router's counts of one of its nodes.

    Attributes:
        up: whether it takes requests.
        inside: outputs that it has now; ``requests``: that it was asked for, prompts included;
            ``lost``: of these, those that it has not ended.
        rate: tokens of prompts that it reads a second; 0: unknown.
    """

    name: str
    role: str
    up: bool
    inside: int
    requests: int
    lost: int
    rate: float


@dataclass(frozen=True)
class Figures:
    """The engine's counts at one time.

    Attributes:
        weight_bytes: that a one-token step reads.
        read_bytes, expert_bytes: of weights, and of experts among them, that the CPU has read in
            steps without prompts.
        nodes: of a router.
        cache: counts of the experts in a GPU's slots, by name; none without slots.
        speed: of its first decode steps, beside what was predicted; None: not known.
    """

    stats: EngineStats
    weight_bytes: int
    read_bytes: int
    expert_bytes: int
    cache: Mapping[str, float] = field(default_factory=dict)
    nodes: Sequence[NodeFigures] = ()
    speed: Speed | None = None


class ServedModel(Protocol):
    """A model on an engine, for one event loop."""

    facts: ModelFacts
    tokenizer: PreTrainedTokenizerBase | None
    trouble: str
    """Why it is not ``healthy``, if it is not."""
    recovers: bool
    """Whether it may be healthy again: requests are taken meanwhile, and wait."""

    def attach(self) -> None:
        """Called once, in the event loop that asks it from then on."""
        ...

    async def detach(self) -> None:
        """Called once, in that loop, when nothing is asked any more."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether the engine can still serve anything."""
        ...

    def asubmit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        special: Collection[str],
        drawn: Sequence[int] = (),
    ) -> AsyncRequestHandle:
        """Queue a prompt.

        Args:
            drawn: tokens of its output that were drawn elsewhere, see ``Intake.requests``.
            special: tokens that have a text here, though texts usually leave them out.

        Raises:
            PykernelsError: the engine can never serve it, or takes no requests; ``EngineBusy``.
        """
        ...

    async def held(self, keys: Sequence[bytes]) -> Held:
        """What the engine has of a prompt with these keys of its full pages."""
        ...

    def meet(self, peers: Sequence[Peer]) -> None:
        """Lets what is submitted from now on have pages from these nodes' memory."""
        ...

    async def figures(self) -> Figures:
        """The figures as they are now."""
        ...

    def observe(self, steps: int, title: str) -> tuple[Future[None], Callable[[], bytes]]:
        """Records the next steps that have work.

        Returns:
            What ends behind the last of them; cancelled, it observes no more. And what gives their
            timeline as JSON then.

        Raises:
            PykernelsError: they cannot be observed now.
        """
        ...
