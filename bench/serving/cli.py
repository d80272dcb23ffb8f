"""`pykernels bench serve`: drives a server and prints what its clients saw."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.cli.shared.common import Debug, command, err, note, read_key, show
from pykernels.errors import PykernelsError

from ..harness.keeping.provenance import provenance
from .workload import CLIENTS, Load

if TYPE_CHECKING:
    from .client import Outcome


@command
def serve(
    load: Load,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Of the server, with or without /v1."),
    ] = None,
    ttft_limit: Annotated[
        float | None,
        typer.Option(metavar="S", help="Goodput: answers whose first token comes in time,"),
    ] = None,
    itl_limit: Annotated[
        float | None,
        typer.Option(metavar="MS", help="and whose tokens after it take no longer on average."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of arrivals, prompts and cancels. A server has cached the prompts of a seed"
            " that it knows.",
            show_default="a new one",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its first line is the key that the server asks for."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One flat JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Drive a server that speaks OpenAI's API, and time it as its clients see it."""
    if url is None:
        raise PykernelsError(
            "bench serve drives a server that runs, and no --url is given",
            "Start one with pykernels serve, then add --url http://127.0.0.1:8080",
        )
    for flag, limit in (("--ttft-limit", ttft_limit), ("--itl-limit", itl_limit)):
        if limit is not None and not limit > 0:
            raise PykernelsError(f"{flag} {limit:g}", "Give a limit above 0")
    if load.clients is None and math.isinf(load.rate):
        load = replace(load, clients=CLIENTS)
    load = replace(load, seed=secrets.randbelow(1 << 31) if seed is None else seed)
    row = asyncio.run(_run(url, read_key(api_key_file), load, ttft_limit, itl_limit))
    if as_json:
        print(json.dumps(provenance() | row))
    else:
        _show(row)


async def _run(
    url: str, key: str | None, load: Load, ttft_limit: float | None, itl_limit: float | None
) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from .client import Server
    from .drive import drive
    from .figures import figures
    from .workload import plan

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    async with Server(url, key) as server:
        console = err()
        hidden = not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            warming = progress.add_task("warming up", total=1)
            accepted = await server.accepted(load.prompt, load.seed)
            progress.update(warming, completed=1)
            running = progress.add_task("requests", total=load.requests)
            planned = plan(load, accepted.vocabulary, accepted.pieces_per_token)

            def done(outcome: Outcome) -> None:
                progress.advance(running)

            outcomes = await drive(server, accepted, load, planned, done)
    if not accepted.takes_ids:
        note(
            "the server has no /tokenize or takes no token ids: prompts are texts of about --prompt"
        )
    if not accepted.ignores_eos:
        note("the server does not know ignore_eos: answers may be shorter than --tokens")
    row = figures(load, outcomes, ttft_limit, itl_limit)
    return {
        "model": accepted.model,
        "token_ids": accepted.takes_ids,
        "ignore_eos": accepted.ignores_eos,
        **row,
    }


def _show(row: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    r = row
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    bound = "" if r["clients"] is None else f", at most {r['clients']} at once"
    arrivals = "as soon as answered" if r["rate"] == "inf" else f"{r['rate']:g} arrivals/s"
    shared = f", {r['shared_prefix']} of them shared" if r["shared_prefix"] else ""
    rows = {
        "model": r["model"],
        "load": f"{r['requests']} requests, {arrivals}{bound}",
        "seed": str(r["seed"]),
        "request": f"{r['prompt']} tokens{shared}, {r['tokens']} out",
        "outcome": f"{r['completed']} whole, {r['cancelled']} cancelled, {r['refused_429']} refused"
        f" (429), {r['errors']} errors" + (f", most often {r['why']}" if r["why"] else ""),
        "first token": _times(r, "ttft"),
        "between pieces": _times(r, "itl"),
        "a token": _times(r, "tpot"),
        "whole answer": _times(r, "e2e"),
        "tokens": f"{r['input_tok_s']:.1f} tokens/s in, {r['cached_share']:.0%} of them cached;"
        f" {r['output_tok_s']:.1f} tokens/s out",
        "requests": f"{r['requests_s']:.2f}/s over {r['seconds']:.1f} s",
    }
    if r["good"] is not None:
        limits = [] if r["ttft_limit_s"] is None else [f"first token in {r['ttft_limit_s']:g} s"]
        if r["itl_limit_ms"] is not None:
            limits.append(f"a token in {r['itl_limit_ms']:g} ms")
        rows["goodput"] = (
            f"{r['goodput_requests_s']:.2f} requests/s, {r['good']} of {r['requests']}:"
            f" {', '.join(limits)}"
        )
    for name, value in rows.items():
        table.add_row(name, Text(value))  # a server's words are no markup
    show(table)


def _times(row: dict[str, Any], name: str) -> str:
    if row[f"{name}_ms_p50"] is None:
        return "none"
    p50, p90, p99 = (row[f"{name}_ms_p{p}"] for p in (50, 90, 99))
    return f"{p50:.1f} ms median, p90 {p90:.1f}, p99 {p99:.1f}"
