"""`pykernels generate` and `pykernels chat`: text to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykernels.errors import PykernelsError
from pykernels.registry import requested

from .common import Debug, Kernel, Numa, Threads, command, err, note, prepare_threads

if TYPE_CHECKING:
    from ..text.generate import GenerationStats

Model = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Checkpoint folder.", show_default="the embedded model"),
]
Rules = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Injection rules.", show_default="those of the architecture"),
]
Device = Annotated[
    str, typer.Option(metavar="cpu|cuda:0", help="Where everything but the experts runs.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="bfloat16|float32", help="Of the dense part.", show_default="the config's"
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Stop after N tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token.")
]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, metavar="P", help="Sample from this much probability.")
]
TopK = Annotated[
    int, typer.Option(min=0, metavar="K", help="Sample from the K likeliest tokens; 0: all.")
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="The same seed gives the same text.")]


class Writer:
    """A loaded model that writes: what `generate` and `chat` have in common."""

    def __init__(
        self,
        model: Path | None,
        rules: Path | None,
        device: str,
        dtype: str | None,
        threads: int | None,
        kernel: str | None,
        numa: str,
        prompt: str | None = None,
        **sampling: Any,
    ) -> None:
        """Check the options and that `prompt` fits the context, then load.

        `sampling` goes to `generate_stream` as it is.
        """
        chosen_kernel, chosen_threads = requested(kernel), prepare_threads(threads)
        self.sampling = sampling
        with _status("importing torch and transformers"):
            from transformers.utils import logging

            from .. import EMBEDDED, from_pretrained, load_tokenizer
            from ..text.generate import check_options

            logging.set_verbosity_error()
            logging.disable_progress_bar()
        check_options(**sampling)
        path = model or EMBEDDED
        self.tokenizer = load_tokenizer(path)
        if prompt is not None:
            self._check(path, prompt)
        self.model = from_pretrained(
            path,
            rules=rules,
            device=device,
            dtype=dtype,
            threads=chosen_threads,
            kernel=chosen_kernel,
            numa=numa,
        )

    def _check(self, path: Path, prompt: str) -> None:
        """Refuse a prompt that does not fit before minutes are spent on loading a large model."""
        import torch

        from ..checkpoint.config import read_config
        from ..pretrained import build_meta
        from ..text.prompt import check_context, encode

        hollow = build_meta(read_config(path), torch.bfloat16)
        tokens = len(encode(hollow, self.tokenizer, prompt))
        check_context(hollow, tokens, self.sampling["max_new_tokens"])

    def write(self, prompt: str, echo: bool = False) -> tuple[str, GenerationStats]:
        """Stream the continuation of `prompt` to stdout; returns it with its figures.

        With `echo` the prompt is written first, once it is known to fit.
        """
        from ..text.generate import generate_stream

        stream = generate_stream(self.model, self.tokenizer, prompt, **self.sampling)
        text = prompt if echo else ""
        answer = ""
        try:
            with _status("reading the prompt"):  # the first run compiles the kernels here, too
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
        return answer, stream.stats


def summary(stats: GenerationStats, roof: float | None) -> str:
    """The line under a generated text.

    Args:
        stats: what `generate_stream` measured.
        roof: GB/s that this machine's cores read from memory, measured in this process.
    """
    parts = [
        f"{stats.prompt_tokens} prompt token{'s' * (stats.prompt_tokens > 1)}",
        f"prefill {stats.prefill_tokens_per_second:.0f} tok/s",
        f"decode {stats.decode_tokens_per_second:.1f} tok/s",
    ]
    if stats.expert_seconds > 0:
        experts = f"experts {stats.expert_gb_per_second:.2f} GB/s"
        if roof:
            share = 100 * stats.expert_gb_per_second / roof
            experts += f" ({share:.0f} % of the {roof:.0f} GB/s read roof)"
        parts.append(experts)
    return " · ".join(parts)


@contextmanager
def _status(what: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time; nothing where stderr is no terminal."""
    with err().status(f"{what} …", spinner_style="dim"):
        yield


def _read_roof() -> float | None:
    """GB/s that the cores read, measured now; None, with a note, beside a model that fills the
    memory."""
    from runtime.profiling.roofline import read_roof
    from runtime.workers.pool import default_pool

    try:
        with _status("measuring the read roof"):
            return read_roof(default_pool())
    except PykernelsError as error:
        note(f"no share of the read roof: {error}")
        return None


@command
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to go on from; - reads it from stdin.")
    ],
    model: Model = None,
    rules: Rules = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    seed: Seed = 0,
    threads: Threads = None,
    kernel: Kernel = None,
    numa: Numa = "auto",
    echo: Annotated[bool, typer.Option(help="Write the prompt before its continuation.")] = True,
    debug: Debug = False,
) -> None:
    """Go on from PROMPT and stream the text; one summary line ends it."""
    if prompt == "-":
        _check_stdin()
        prompt = _read(sys.stdin.read)
    writer = Writer(
        model,
        rules,
        device,
        dtype,
        threads,
        kernel,
        numa,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    _, stats = writer.write(prompt, echo)
    err().print(summary(stats, _read_roof()), style="dim", markup=False)


@command
def chat(
    model: Model = None,
    rules: Rules = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    seed: Seed = 0,
    threads: Threads = None,
    kernel: Kernel = None,
    numa: Numa = "auto",
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    debug: Debug = False,
) -> None:
    """Talk with the model, turn by turn; /reset forgets, /exit or Ctrl-D leaves."""
    _check_stdin()
    writer = Writer(
        model,
        rules,
        device,
        dtype,
        threads,
        kernel,
        numa,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    from runtime.workers.pool import default_pool

    from ..text.generate import chat_prompt

    if not getattr(writer.tokenizer, "chat_template", None):
        note("this model was not trained to chat: it goes on from a plain transcript")
    note("/reset forgets the conversation, /exit or Ctrl-D leaves")
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while (said := _ask()) is not None:
        if said == "/reset":
            messages = list(first)
            continue
        if not said:
            continue
        turn = [*messages, {"role": "user", "content": said}]
        try:
            answer, stats = writer.write(chat_prompt(writer.tokenizer, turn))
        except KeyboardInterrupt:
            default_pool().settle()
            note("stopped; this turn is forgotten")
            continue
        except PykernelsError as error:  # the context is full, say: the conversation goes on
            err().print(f"error: {error}", markup=False)
            continue
        messages = [*turn, {"role": "assistant", "content": answer}]
        err().print(summary(stats, None), style="dim", markup=False)


def _check_stdin() -> None:
    """Raises `PykernelsError` where the program was started without one."""
    if sys.stdin is None:
        raise PykernelsError("stdin is closed", "Send it some text, or start it in a terminal")


def _read(text: Callable[[], str]) -> str:
    """What `text` reads from stdin; `PykernelsError` for bytes of another encoding."""
    try:
        return text()
    except UnicodeDecodeError as error:
        from ..text.prompt import NO_TEXT

        raise PykernelsError(f"stdin is no {error.encoding} text", NO_TEXT) from None


def _ask() -> str | None:
    """The next line that the user types; None at /exit and at the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() a history and line editing)

        err().print("you", style="bold cyan", end="")
    try:
        said = _read(lambda: input("> " if sys.stdin.isatty() else "")).strip()
    except EOFError:
        return None
    return None if said == "/exit" else said
