"""A model that an engine serves: text in, text out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from pykernels.errors import PykernelsError
from runtime.engine import Engine, EngineConfig, RequestHandle, Result, SamplingParams
from runtime.engine.pace import Speed
from runtime.experts.cache import CacheStats
from runtime.kv_tiers.behind import KvBehind
from runtime.passes.layers import moe_layers
from runtime.planning.compile import compile
from runtime.planning.execution import ExecutionPlan
from runtime.planning.placement import CPU
from runtime.program import Program
from runtime.program.sizes import ONE_TOKEN, StepSizes
from runtime.runner.paged_runner import PagedRunner
from runtime.workers.pool import WorkerPool

from .architectures.decoder import Decoder
from .checkpoint.config import read_config
from .opened import engine_device, open_weights
from .rules import Rules
from .text.detokenize import Detokenizer
from .text.prompt import encode, encode_chat
from .text.settings import engine_settings

if TYPE_CHECKING:
    from .planner.forecast import Forecast

Prompt = str | Sequence[int]


class LLM:
    """A model that an engine serves, with its tokenizer: text in, text out.

    Where a request's settings are given as keywords, those that are not given are the ones of the
    checkpoint's generation_config.json: penalties, stop strings, suppressed tokens, temperature and
    so on. A ``SamplingParams`` is taken as it is, and so is what ``engine`` itself is given.

    Attributes:
        engine: for token ids, handles and asyncio; ``runner``: the model on its device.
        settings: sampling settings of the generation config.
        chosen: why it runs as it does, where a prediction has chosen that; "": nothing was open.
        drafts: likewise why its outputs have drafts, or none.
    """

    chosen = drafts = ""
    speed: Speed | None = None
    """What ``check_speed`` has found."""

    def __init__(
        self,
        runner: PagedRunner,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        eos: Sequence[int],
        pool: WorkerPool,
        kernel: str = "auto",
        generation: GenerationConfig | None = None,
        engine: EngineConfig | None = None,
        behind: KvBehind | None = None,
    ) -> None:
        self.runner, self.config, self.tokenizer = runner, config, tokenizer
        self.pool, self.kernel = pool, kernel
        self.settings = engine_settings(generation, eos, runner.vocab_size, tokenizer is not None)
        self._told = False
        detokenizer = None if tokenizer is None else partial(Detokenizer, tokenizer)
        self.engine = Engine(
            runner,
            eos_token_ids=eos,
            detokenizer=detokenizer,
            config=engine,
            tiers=None if behind is None else partial(behind.tiers, runner),
        )

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its output: what the context and the KV cache hold."""
        # The last token is drawn but never computed: it needs no place in the cache.
        places = self.runner.num_pages * self.runner.page_size + 1
        return min(self.runner.max_model_len, places)

    @property
    def decisions(self) -> Sequence[str]:
        """What sizes and measurements have decided, and why, a line each."""
        return (*self._chosen(), *self.runner.decisions, *self.engine.decisions)

    def _chosen(self) -> Iterator[str]:
        """Where it runs, why, and the speed that is predicted."""
        if self.chosen:
            yield f"{self.runner.plan.placement.device}: {self.chosen}"
        elif self.forecast is not None:
            yield f"{self.runner.plan.placement.device}: {self.forecast.line}"
        if self.drafts:
            yield self.drafts

    @cached_property
    def forecast(self) -> Forecast | None:
        """Predicts its decode steps; None where nothing is known of what runs."""
        from .planner.forecast import forecast_of

        return forecast_of(self.runner.model, self.runner.plan, self.pool)

    def check_speed(self) -> Speed | None:
        """Its first decode steps beside what is predicted for them; None until there were enough,
        or without a prediction."""
        pace = self.engine.pace
        if self.speed is None and pace is not None and self.forecast is not None:
            self.speed = self.forecast.speed(pace)
        return self.speed

    @property
    def gpu_experts(self) -> Mapping[str, Sequence[int]]:
        """By the name of a layer's experts, those that a GPU has beside all of them on the CPU."""
        return self.runner.plan.placement.gpu_experts_of

    @property
    def expert_cache(self) -> CacheStats | None:
        """Hits and swaps of the experts that a GPU has in slots; None: it has no slots."""
        return self.runner.expert_slots.stats if self.runner.expert_slots is not None else None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text that is to be continued, see ``text.prompt.encode``; ids stay."""
        if not isinstance(prompt, str):
            return list(prompt)
        return encode(self, self._tokenizer(), prompt)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, by the tokenizer's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}``, oldest first.

        Raises:
            PykernelsError: there is no tokenizer, or the template refuses the conversation.
        """
        return encode_chat(self, self._tokenizer(), messages)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> RequestHandle:
        """Queues a prompt; the handle gives chunks, or the result.

        Args:
            params: or its fields as ``settings``.

        Raises:
            PykernelsError: this engine can never serve it.
        """
        return self.engine.submit(*self._request(prompt, params, settings))

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> Result:
        """The continuation of one prompt; ``engine.generate`` takes many. Ctrl-C cancels it."""
        handle = self.submit(prompt, params, **settings)
        try:
            return handle.result()
        finally:
            if not handle.finished:
                handle.cancel()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> Iterator[str]:
        """The continuation as it is generated; a consumer that stops iterating cancels it."""
        for chunk in self.engine.stream(*self._request(prompt, params, settings)):
            yield chunk.text

    def _request(
        self, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]
    ) -> tuple[list[int], SamplingParams]:
        ids = self.encode(prompt)
        if params is None:
            return ids, self.settings.params(len(ids), self.longest, **settings)
        if settings:
            raise PykernelsError(
                f"params and {', '.join(settings)} were given", "Give one or the other"
            )
        if not self._told and (left_out := self.settings.left_out(params)):
            self._told = True
            named = ", ".join(f"{name}={str(value)[:40]}" for name, value in left_out.items())
            warnings.warn(
                f"a SamplingParams is taken as it is, without the {named} of the generation"
                " config; settings that are given as keywords keep it",
                stacklevel=3,
            )
        return ids, params

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise PykernelsError("This model has no tokenizer", "Give token ids")
        return self.tokenizer

    def close(self) -> None:
        """Ends the engine and its workers."""
        self.engine.close()
        self.runner.close()
        self.pool.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def placed_program(
    path: Path, rules: Rules, device: str, experts: str, tokens: int, slots: int = 0
) -> Program:
    """The program of a step of at most so many tokens, its nodes where they would run.

    Args:
        experts: where routed experts are if there is a GPU: "cpu" or "gpu".
        slots: of each layer for experts on the device besides.

    Raises:
        PykernelsError: as ``load_engine``.
    """
    config = read_config(path)
    device = engine_device(device, rules, config.model_type)
    with open_weights(path, config, rules, device=device) as weights:
        sizes = StepSizes(tokens, tokens, tokens)
        program = weights.decoder.lower(sizes)
        if device == CPU:
            if experts == "gpu":
                raise PykernelsError("experts on a GPU without one", "Add --device cuda:0")
            return program
        from runtime.devices.cuda.layouts import CudaLayouts
        from runtime.devices.gpus import gpus_of
        from runtime.planning.gpu.machine import Machine
        from runtime.planning.gpu.plan import place_on

        gpus = gpus_of(device)
        free = dict.fromkeys(gpus, 1 << 40)  # bytes: GPUs that need not be there
        machine = Machine(free, CudaLayouts())
        placement = place_on(machine, weights.decoder, ONE_TOKEN, experts, *weights.placed)
        layers = {layer.experts.layer or 0: slots for layer in moe_layers(program) if slots}
        plan = ExecutionPlan(sizes, placement.with_slots(program, layers))
        return compile(weights.decoder, plan, tokens=tokens).program


def meta_decoder(path: Path, rules: Rules = None) -> Decoder:
    """A checkpoint's decoder, to look at its programs: no weight is read.

    Raises:
        PykernelsError: as ``load_engine``.
    """
    with open_weights(path, read_config(path), rules) as weights:
        return weights.decoder
