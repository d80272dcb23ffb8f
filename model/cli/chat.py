"""`pykernels chat`: a conversation, turn by turn."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from pykernels.errors import PykernelsError

from .common import Debug, Kernel, Numa, Threads, command, err, note
from .session import (
    Defer,
    Device,
    Dtype,
    Eager,
    Experts,
    GpuExperts,
    KvDtype,
    MaxNewTokens,
    Model,
    Rules,
    Seed,
    Session,
    Temperature,
    TopK,
    TopP,
    check_stdin,
    read_stdin,
    summary,
)

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@command
def chat(
    model: Model = None,
    rules: Rules = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    threads: Threads = None,
    kernel: Kernel = None,
    numa: Numa = "auto",
    eager: Eager = False,
    defer: Defer = "off",
    kv_dtype: KvDtype = "bf16",
    experts: Experts = "auto",
    gpu_experts: GpuExperts = None,
    system: Annotated[str, typer.Option(help="System message, put before the conversation.")] = "",
    debug: Debug = False,
) -> None:
    """Talk with the model, turn by turn; /reset forgets, /exit or Ctrl-D leaves."""
    check_stdin()
    session = Session(
        model,
        rules,
        device,
        dtype,
        threads,
        kernel,
        numa,
        eager,
        defer=defer,
        kv_dtype=kv_dtype,
        gpu_experts=gpu_experts,
        experts=experts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )

    if not getattr(session.tokenizer, "chat_template", None):
        note("this model was not trained to chat: it goes on from a plain transcript")
    note(COMMANDS)
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while (line := _ask()) is not None:
        if line == "/reset":
            messages = list(first)
            continue
        if re.fullmatch(r"/\w+", line):  # /help, or one that is mistyped: no question to a model
            note(COMMANDS)
            continue
        if not line:
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            answer, stats = session.write(session.encode_chat(turn))
        except KeyboardInterrupt:
            note("stopped; this turn is forgotten")
            continue
        except PykernelsError as error:  # a full context, for one: the conversation goes on
            err().print(f"error: {error}", markup=False)
            continue
        messages = [*turn, {"role": "assistant", "content": answer}]
        err().print(summary(stats, None), style="dim", markup=False)


def _ask() -> str | None:
    """The next line that the user types; None at /exit and at the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() a history and line editing)

        err().print("you", style="bold cyan", end="")
    try:
        line = read_stdin(lambda: input("> " if sys.stdin.isatty() else "")).strip()
    except EOFError:
        return None
    return None if line == "/exit" else line
