"""Streamed text from a model, with the figures of the run.

The tokens come from transformers' own `generate`, run in a thread with a streamer: greedy text is
exactly what `model.generate` gives, and every setting of the checkpoint's generation_config holds.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from pykernels.errors import PykernelsError

from ..modules.moe import routed_experts
from .detokenize import Detokenizer
from .prompt import chat_prompt, check_context, encode

__all__ = ["GenerationStats", "GenerationStream", "chat_prompt", "generate_stream"]


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Figures of one run. Seconds are wall-clock.

    `prefill_seconds` ends with the first token; decoding is all after it. `read_bytes` and
    `read_seconds` are of decoding only, where memory bounds the speed: eagerly the weights of the
    distinct experts that each step touched, while they ran; in the engine all weights of a step.
    `reads` says which; steps with drafts read another number each, so none is told of them.
    `accepted_tokens` of the `draft_tokens` were what was drawn.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    read_bytes: int
    read_seconds: float
    reads: str = "experts"
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        return _rate(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        return _rate(max(0, self.new_tokens - 1), self.decode_seconds)

    @property
    def read_gb_per_second(self) -> float:
        """GB/s (1e9 bytes) at which weights were read."""
        return _rate(self.read_bytes, self.read_seconds) / 1e9

    @property
    def read_bytes_per_step(self) -> float:
        """Bytes of weights that a decode step reads, from memory or from the caches."""
        return self.read_bytes / max(1, self.new_tokens - 1)


def generate_stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
) -> GenerationStream:
    """Continue `prompt`; iterate over the result for pieces of text, then read its `.stats`.

    Args:
        prompt: a text, or token ids.
        max_new_tokens: at most this many; the end-of-text token ends it earlier.
        temperature: 0 takes the likeliest token each time.
        top_p, top_k: sample among the likeliest tokens only; 1 and 0 keep all.
        seed: for sampling; the global random state is restored afterwards. None: continue it.

    Raises:
        PykernelsError: before any work, for a bad option, an empty prompt of a model without a bos
            token, or a prompt that with its continuation does not fit the context.
    """
    check_options(max_new_tokens, temperature, top_p, top_k, seed)
    ids = encode(model, tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
    check_context(model, len(ids), max_new_tokens)
    config = _generation_config(model, max_new_tokens, temperature, top_p, top_k)
    return GenerationStream(model, tokenizer, ids, config, seed)


class GenerationStream:
    """Iterator of text pieces; has `stats` once it has ended (also when it was closed early).

    Generation starts with the first `next`. Closing the iterator, or Ctrl-C while it waits, stops
    the model after the current token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ids: list[int],
        config: GenerationConfig,
        seed: int | None,
    ) -> None:
        self.prompt_ids = ids
        self.token_ids: list[int] = []
        self._stats: GenerationStats | None = None
        self._pieces = self._run(model, tokenizer, config, seed)

    @property
    def stats(self) -> GenerationStats:
        if self._stats is None:
            raise RuntimeError("the text is not finished: iterate over the stream first")
        return self._stats

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop now."""
        self._pieces.close()

    def _run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        seed: int | None,
    ) -> Any:
        text, streamer = Detokenizer(tokenizer), _Tokens(model)
        prompt = torch.tensor([self.prompt_ids], dtype=torch.int64, device=model.device)

        def work() -> None:
            try:
                with _seeded(seed, model.device):
                    model.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        generation_config=config,
                        streamer=streamer,
                        stopping_criteria=StoppingCriteriaList([_Stop(streamer.stopped)]),
                        tokenizer=tokenizer,  # stop strings are looked for in its texts
                    )
                streamer.tokens.put(None)
            except BaseException as error:  # raised again in the reader's thread
                streamer.tokens.put(error)

        thread = threading.Thread(target=work, name="generate", daemon=True)
        streamer.started = time.perf_counter()
        thread.start()
        try:
            while (token := streamer.tokens.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                self.token_ids.append(token)
                if piece := text.push(token):
                    yield piece
            if piece := text.finish():
                yield piece
        finally:
            streamer.stopped.set()
            thread.join()
            self._stats = streamer.stats(len(self.prompt_ids), len(self.token_ids))


class _Tokens(BaseStreamer):
    """Streamer that queues the tokens of `generate`, and notes times and what experts have read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.experts = routed_experts(model)
        self.started = self.first = self.last = 0.0
        self.bytes = self.seconds = 0.0
        self.got_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self.got_prompt:  # generate streams the prompt first
            self.got_prompt = True
            return
        self.last = time.perf_counter()
        if not self.first:
            self.first = self.last
            self.bytes, self.seconds = self._read()
        for token in value.flatten().tolist():
            self.tokens.put(token)

    def end(self) -> None:
        """Nothing to do: the thread itself queues the end, errors included."""

    def stats(self, prompt_tokens: int, new_tokens: int) -> GenerationStats:
        first = self.first or time.perf_counter()
        now_bytes, now_seconds = self._read()
        return GenerationStats(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            prefill_seconds=first - self.started,
            decode_seconds=max(0.0, self.last - first),
            read_bytes=int(now_bytes - self.bytes) if self.first else 0,
            read_seconds=now_seconds - self.seconds if self.first else 0.0,
        )

    def _read(self) -> tuple[float, float]:
        return sum(e.read_bytes for e in self.experts), sum(e.read_seconds for e in self.experts)


class _Stop(StoppingCriteria):
    """Ends the generation when the reader has closed the stream."""

    def __init__(self, stopped: threading.Event) -> None:
        self.stopped = stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        state = self.stopped.is_set()
        return torch.full((input_ids.shape[0],), state, dtype=torch.bool, device=input_ids.device)


class _seeded:
    """Seed torch's generators for the block and restore their state after it."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self.seed = seed
        self.fork = torch.random.fork_rng(
            devices=[device.index or 0] if device.type == "cuda" else [], enabled=seed is not None
        )

    def __enter__(self) -> None:
        self.fork.__enter__()
        if self.seed is not None:
            torch.manual_seed(self.seed)

    def __exit__(self, *raised: Any) -> None:
        self.fork.__exit__(*raised)


def _generation_config(
    model: PreTrainedModel, max_new_tokens: int, temperature: float, top_p: float, top_k: int
) -> GenerationConfig:
    """The checkpoint's own settings, overridden by the arguments."""
    config = copy.deepcopy(model.generation_config) or GenerationConfig()
    sample = temperature > 0
    config.max_new_tokens = max_new_tokens
    config.num_beams = config.num_return_sequences = 1  # more cannot be streamed
    config.do_sample = sample
    # Greedy: neutral values, since None would be filled from the checkpoint's settings, and any
    # other value makes transformers warn.
    config.temperature = temperature if sample else 1.0
    config.top_p = top_p if sample else 1.0
    config.top_k = top_k if sample else 50
    config.disable_compile = True
    if config.pad_token_id is None:
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, (list, tuple)) else eos
    return config


_COLDEST = 1e-30
"""Logits divided by a lower temperature overflow float32."""


def check_options(
    max_new_tokens: int, temperature: float, top_p: float, top_k: int, seed: int | None = None
) -> None:
    """Raise `PykernelsError` for options out of range; needs no model."""
    checks = (
        (max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "1 or more"),
        (0 <= temperature < float("inf"), "temperature", temperature, "0 or more"),
        (
            temperature == 0 or temperature >= _COLDEST,
            "temperature",
            temperature,
            f"0, or {_COLDEST:g} or more",
        ),
        (0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1"),
        (top_k >= 0, "top_k", top_k, "0 (all tokens) or more"),
        (seed is None or -(2**63) <= seed < 2**64, "seed", seed, "a number below 2**64"),
    )
    for good, name, value, wanted in checks:
        if not good:
            raise PykernelsError(f"{name} is {value}", f"Set it to {wanted}")


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
