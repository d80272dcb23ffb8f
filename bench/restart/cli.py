"""`pykernels bench restart`: the first token of a conversation that is read for the first time, of
the same one after a restart, from disk, and of the same one again, from the pages.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from model.cli.shared.common import Debug, command, err, out
from model.cli.shared.execution import opened_with
from model.cli.shared.model_options import Model
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from ..harness.keeping.provenance import provenance

ROWS = {
    "cold": ("computed", None),
    "disk": ("from disk", 0.1),
    "ram": ("from memory", 0.05),
    "memory": ("from pages", 0.05),
    "turn": ("of a next turn", 0.1),
}
"""By name in the figures: what they are, and the largest share of a cold one that is good."""


@command
def restart(
    execution: ExecutionConfig,
    model: Model = None,
    tokens: Annotated[
        int, typer.Option(min=128, metavar="N", help="Of the conversation, or fewer.")
    ] = 8192,
    conversations: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of which the median is taken.")
    ] = 3,
    turn: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of the next turn's message.")
    ] = 64,
    kv_disk: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="On the disk to be timed.", show_default="a temporary one"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    debug: Debug = False,
) -> None:
    """Time the first token of a conversation: cold, from disk after a restart, from memory, and
    behind an answer and the message of a next turn.

    What was written is taken out of the system's page cache before it is read. Random tokens; the
    last ones, less than a page, are computed each time.
    """
    path, execution = opened_with(execution, model)
    from .run import timed

    with err().status("loading, timing …", spinner_style="dim") as status:
        with tempfile.TemporaryDirectory(dir=kv_disk, prefix="bench-") as folder:
            try:
                found = timed(
                    path, execution, tokens, conversations, Path(folder), turn, status.update
                )
            except OSError as error:
                raise PykernelsError(
                    f"{folder}: {error.strerror}", "Give another --kv-disk"
                ) from error
    if as_json:
        print(json.dumps(provenance() | found))
        return
    page = f"{float(found['page_bytes']) / 2**20:.2f} MiB"
    out().print(f"{found['model']}, {found['tokens']} tokens, {page} a page of 64")
    for name, (what, most) in ROWS.items():
        if (seconds := found.get(f"{name}_s")) is not None:
            share = f"{found[f'{name}_over_cold']:.3f} x"
            good = f", good if at most {most}" if most else ""
            out().print(f"first token {what:<14} {1e3 * seconds:9.1f} ms, {share}{good}")
    computed = found["turn_computed_tokens"]
    out().print(f"a next turn of {turn} tokens computed {computed}, at most")
    out().print(f"read with {found['read_gbps']:.2f} GB/s, beside the engine")
