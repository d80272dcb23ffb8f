"""A model that streams to stdout, for `generate` and `chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pykernels.errors import PykernelsError
from runtime.engine.scheduling.config import EngineConfig
from runtime.planning.config import CHOSEN, ExecutionConfig
from runtime.planning.option import SettingError

from ...startup.lean_import import import_transformers
from .common import err, note
from .execution import opened_with
from .model_options import Sampling

if TYPE_CHECKING:
    from ...engine_stream import EngineStream
    from ...llm import LLM
    from ...text.generate import GenerationStats, GenerationStream

OFF_HINT = "other programs may use the cores; pykernels profile step tells what a step waits for"
"""Where a model is not as fast as predicted."""


class Session:
    """A loaded model and tokenizer with the options of a run: on the engine, or eagerly."""

    def __init__(
        self,
        model: Path | None,
        rules: Path | None,
        dtype: str | None,
        eager: bool,
        execution: ExecutionConfig,
        engine: EngineConfig,
        sampling: Sampling,
        prompt: str | None = None,
    ) -> None:
        """Checks the options and that ``prompt`` fits the context, then loads."""
        eager = eager or dtype is not None
        if eager:
            execution = _eager(execution)
            _check_eager(execution, engine)
        path, execution = opened_with(execution, model, rules)
        with status("importing torch and transformers"):
            import_transformers()
            from transformers.utils import logging

            from ... import load_tokenizer
            from ...architectures.families import why_not
            from ...checkpoint.config import read_config
            from ...opened import engine_device
            from ...pretrained import read_generation_config
            from ...rules import resolve_rules
            from ...text.generate import check_options
            from ...text.settings import with_defaults

            logging.set_verbosity_error()
            logging.disable_progress_bar()
        self.sampling = with_defaults(sampling.as_dict(), read_generation_config(path))
        check_options(**self.sampling)
        self.tokenizer = load_tokenizer(path)
        wanted = 0 if prompt is None else self._check(path, prompt)
        config = read_config(path)
        parsed = resolve_rules(rules, config.model_type)
        device = engine_device(execution.device, parsed, config.model_type)
        execution = replace(execution, device=device).check_device()
        if not eager and device in ("cpu", CHOSEN) and (reason := why_not(config)):
            note(f"the engine cannot run this model, so it runs eagerly: {reason}")
            eager = True
        self.llm: LLM | None = None
        if eager:
            from ... import from_pretrained

            execution = _eager(execution)
            _check_eager(execution, engine)
            threads, kernel, numa = execution.threads, execution.kernel, execution.numa
            self.model = from_pretrained(path, parsed, "cpu", dtype, threads, kernel, numa)
        else:
            from ...load import load_engine

            engine = replace(engine, max_num_seqs=1)
            self.llm = load_engine(
                path, parsed, at_least=wanted, execution=execution, engine=engine
            )
            _tell(self.llm, execution)

    def _check(self, path: Path, prompt: str) -> int:
        """Check that the prompt fits, before minutes are spent on loading a large model; tokens of
        it and its continuation."""
        import torch

        from ...checkpoint.config import read_config
        from ...pretrained import build_meta
        from ...text.prompt import check_context, encode

        shapes = build_meta(read_config(path), torch.bfloat16)
        tokens = len(encode(shapes, self.tokenizer, prompt))
        check_context(shapes, tokens, self.sampling["max_new_tokens"])
        return tokens + int(self.sampling["max_new_tokens"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        from ...text.prompt import encode_chat

        return encode_chat(self.llm or self.model, self.tokenizer, messages)

    def check_room(self, tokens: int) -> None:
        """Raises PykernelsError where a conversation of so many tokens has no room for an answer;
        what gives it more."""
        if self.llm is None:
            return  # Hugging Face's own forward has the model's context, and says so
        new, most = int(self.sampling["max_new_tokens"]), self.llm.longest
        if tokens + new > most:
            positions = getattr(self.llm.config, "max_position_embeddings", most)
            more = f", --max-model-len {positions} gives it more room" if most < positions else ""
            raise PykernelsError(
                f"The conversation's {tokens} tokens and {new} of an answer do not fit the context"
                f" of {most}",
                f"/reset begins a new one{more}",
            )

    def write(self, prompt: str | list[int], echo: bool = False) -> tuple[str, GenerationStats]:
        """Stream the continuation of `prompt` to stdout; returns it with its figures.

        With `echo` a text is written first, once it is known to fit.
        """
        stream = self._stream(prompt)
        text = prompt if echo and isinstance(prompt, str) else ""
        answer = ""
        try:
            with status("reading the prompt"):  # the first run compiles the kernels here, too
                answer = next(stream, "")
            sys.stdout.write(text + answer)
            sys.stdout.flush()
            for piece in stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
                answer += piece
        finally:
            stream.close()
            if answer:
                sys.stdout.write("\n")
                sys.stdout.flush()
        if self.llm is not None and self.llm.speed is None:
            speed = self.llm.check_speed()
            if speed is not None and speed.is_off:
                note(f"{speed.line}: {OFF_HINT}")
        return answer, stream.stats

    def _stream(self, prompt: str | list[int]) -> GenerationStream | EngineStream:
        if self.llm is None:
            from ...text.generate import generate_stream

            return generate_stream(self.model, self.tokenizer, prompt, **self.sampling)
        from ...engine_stream import engine_stream

        return engine_stream(self.llm, prompt, **self.sampling)


def _eager(execution: ExecutionConfig) -> ExecutionConfig:
    """The configuration on the CPU, where the device is open."""
    return replace(execution, device="cpu") if execution.device == CHOSEN else execution


def _check_eager(execution: ExecutionConfig, engine: EngineConfig) -> None:
    """Raises PykernelsError for what Hugging Face's own forward does not do."""
    if execution.device != "cpu":
        raise PykernelsError(
            f"--eager, and --dtype with it, runs on the CPU, not on {execution.device}",
            "Leave it out, or --device and rules that name a GPU",
        )
    execution.check_eager()
    unset = EngineConfig()
    for name in ("draft", "draft_tokens", "max_model_len"):
        if (value := getattr(engine, name)) not in (getattr(unset, name), "off"):
            raise SettingError(name, value, "Leave out --eager and its kin", "is for the engine")


def _tell(llm: LLM, execution: ExecutionConfig) -> None:
    """Notes of where experts are, and of what was decided."""
    device = llm.runner.plan.placement.device
    if execution.gpu_experts is not None:
        layers = llm.gpu_experts
        count = sum(map(len, layers.values()))
        note(f"{count} experts of {len(layers)} layers are on {device} too")
    for line in llm.decisions:
        note(line)
    if (slots := llm.runner.expert_slots) is not None:
        sizes = [spec.shape[0] for spec in slots.specs]
        note(f"{sum(sizes)} slots for experts of {len(sizes)} layers are on {device}")


def summary(stats: GenerationStats, roof: float | None) -> str:
    """The line under a generated text.

    Args:
        stats: what `generate_stream` measured.
        roof: GB/s that this machine's cores read from memory.
    """
    parts = [
        f"{stats.prompt_tokens} prompt token{'s' * (stats.prompt_tokens > 1)}",
        f"prefill {stats.prefill_tokens_per_second:.0f} tok/s",
        f"decode {stats.decode_tokens_per_second:.1f} tok/s",
    ]
    if stats.read_seconds > 0:
        read = f"{stats.reads} {stats.read_gb_per_second:.2f} GB/s"
        if roof:
            share = 100 * stats.read_gb_per_second / roof
            read += f" ({share:.0f} % of the {roof:.0f} GB/s read roof)"
        parts.append(read)
    if stats.draft_tokens:
        parts.append(f"{stats.accepted_tokens} of {stats.draft_tokens} drafts were right")
    return " · ".join(parts)


@contextmanager
def status(what: str) -> Iterator[None]:
    """A spinner on stderr meanwhile; nothing if stderr is no terminal."""
    with err().status(f"{what} …", spinner_style="dim"):
        yield


def check_stdin() -> None:
    """Raise `PykernelsError` if the program was started without a stdin."""
    if sys.stdin is None:
        raise PykernelsError("stdin is closed", "Send it some text, or start it in a terminal")


def read_stdin(read: Callable[[], str]) -> str:
    """The result of `read`, which reads stdin; `PykernelsError` for bytes of another encoding."""
    try:
        return read()
    except UnicodeDecodeError as error:
        from ...text.prompt import NOT_UTF8

        raise PykernelsError(f"stdin is no {error.encoding} text", NOT_UTF8) from None
