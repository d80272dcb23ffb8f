"""`pykernels chat`: a conversation, turn by turn."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pykernels.errors import PykernelsError

from ..standard_streams import argument_text
from .http.remote import Remote
from .shared.common import Debug, Kernel, Numa, Threads, command, err, note, read_key
from .shared.session import (
    CachePolicyName,
    DeferOrRules,
    DenseGib,
    Device,
    Dtype,
    Eager,
    ExpertCache,
    Experts,
    GpuExperts,
    KvDtype,
    MaxNewTokens,
    Model,
    Prefill,
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

LOADING = (
    *("model", "rules", "device", "dtype", "threads", "kernel", "numa", "eager", "defer"),
    *("kv_dtype", "experts", "gpu_experts", "prefill", "expert_cache", "expert_cache_policy"),
)
"""Options that say how a model is loaded."""

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@command
def chat(
    context: typer.Context,
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
    defer: DeferOrRules = None,
    kv_dtype: KvDtype = "bf16",
    experts: Experts = "auto",
    gpu_experts: GpuExperts = None,
    prefill: Prefill = "auto",
    dense_gib: DenseGib = "auto",
    expert_cache: ExpertCache = "off",
    expert_cache_policy: CachePolicyName = "lfu",
    system: Annotated[str, typer.Option(help="System message, put before the conversation.")] = "",
    url: Annotated[
        str | None,
        typer.Option(help="A server to talk with, which has its own model: see serve."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its first line is the server's key.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Talk with the model, turn by turn; /reset forgets, /exit or Ctrl-D leaves."""
    check_stdin()
    system = argument_text(system)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    if url is not None:
        _refuse_with_url(context)
        remote = Remote(url, read_key(api_key_file), {**sampling, "max_tokens": max_new_tokens})
        name = remote.model()
        _talk(lambda messages: remote.write(name, messages), system)
        return
    if api_key_file is not None:
        raise PykernelsError("--api-key-file is for a server", "Add --url")
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
        prefill=prefill,
        dense_gib=dense_gib,
        expert_cache=expert_cache,
        expert_cache_policy=expert_cache_policy,
        max_new_tokens=max_new_tokens,
        **sampling,
    )

    def answer(messages: list[dict[str, str]]) -> tuple[str, str]:
        text, stats = session.write(session.encode_chat(messages))
        return text, summary(stats, None)

    if not getattr(session.tokenizer, "chat_template", None):
        note("this model was not trained to chat: it goes on from a plain transcript")
    _talk(answer, system)


def _refuse_with_url(context: typer.Context) -> None:
    """Raises PykernelsError for an option of a model that the server has loaded already."""
    for name in LOADING:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise PykernelsError(f"{option} is for a model of this process", "Leave out --url")


def _talk(answer: Callable[[list[dict[str, str]]], tuple[str, str]], system: str) -> None:
    """Asks, and has answers written.

    Args:
        answer: writes one to a conversation; returns it with its figures.
    """
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
            text, figures = answer(turn)
        except KeyboardInterrupt:
            note("stopped; this turn is forgotten")
            continue
        except PykernelsError as error:  # a full context, for one: the conversation goes on
            err().print(f"error: {error}", markup=False)
            continue
        messages = [*turn, {"role": "assistant", "content": text}]
        err().print(figures, style="dim", markup=False)


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
