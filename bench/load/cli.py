"""`pykernels bench load`: loading, timed beside plain reading of the same files."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from model.cli.common import Debug, Threads, command, err, note, out, prepare_threads
from model.hub import local
from pykernels.env import env

from ..e2e.cli import check_options
from ..e2e.model_options import ARCHS, Checkpoint, Layers, NumExperts, Vocab, count

if TYPE_CHECKING:
    from rich.table import Table

    from .run import Row


@command
def load(
    model: Checkpoint = None,
    arch: Annotated[
        str | None, typer.Option(metavar=ARCHS, help="A random checkpoint of that shape instead.")
    ] = None,
    layers: Layers = None,
    experts: NumExperts = None,
    vocab: Vocab = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of --arch's files: bf16 or fp8 safetensors, else GGUF (q8_0, q4_k ...).",
            show_default="bf16",
        ),
    ] = None,
    convert: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Format of the packed experts.", show_default="as they are stored"
        ),
    ] = None,
    rounds: Annotated[int, count("Turns, of which the fastest counts.")] = 1,
    threads: Threads = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the files in PYKERNELS_CACHE_DIR/load.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Time reading, loading and mapping a model's weights, with cold and with warm files.

    Cold: the files' pages were put out of memory (posix_fadvise); a disk or a hypervisor may still
    have a cache of its own. Weights alone count: headers, reading, packing.
    """
    given = {"format": format, "layers": layers, "experts": experts, "vocab": vocab}
    check_options(model, arch, given)
    chosen = prepare_threads(threads)
    from model import EMBEDDED
    from runtime.machine.topology import Topology

    from ..e2e.ours import Shape
    from .checkpoint import write_checkpoint
    from .run import Loads, PeerMissing, ToolMissing, llama_cpp

    count_ = chosen or Topology.detect().default_threads()
    home = env.cache_dir / "load"
    home.mkdir(parents=True, exist_ok=True)
    folder = home if keep else Path(tempfile.mkdtemp(dir=home))
    try:
        with err().status("", spinner_style="dim") as status:
            source, fmt = EMBEDDED if model is None else local(model), format or "bf16"
            name = "-".join([arch or source.name, *(f"{k[0]}{v}" for k, v in given.items() if v)])
            config = None
            if arch is not None:
                status.update("writing the checkpoint …")
                config = Shape(arch, layers, experts, vocab).config()
                source = write_checkpoint(config, fmt, folder, name)
            packed = folder / f"{name}.{convert or 'stored'}.packed"

            def step(what: str) -> None:
                status.update(f"{what} …")

            rows = Loads(source, packed, count_, convert, rounds).rows(step)
            if config is not None:
                try:
                    rows.append(llama_cpp(config, fmt, folder, name, count_, step))
                except (PeerMissing, ToolMissing) as error:
                    note(f"llama.cpp is not timed: {error}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print(json.dumps({"model": name, "threads": count_, "rows": rows}))
    else:
        out().print(_table(rows))


def _table(rows: list[Row]) -> Table:
    from rich.table import Column, Table

    table = Table(Column("", no_wrap=True), box=None, pad_edge=False)
    for title in (
        "GB",
        "cold s",
        "GB/s",
        "x reading",
        "warm s",
        "GB/s",
        "x reading",
        "peak GB",
        "final GB",
    ):
        table.add_column(title, justify="right")
    keys = ("cold_s", "cold_gbps", "cold_over_reading", "warm_s", "warm_gbps", "warm_over_reading")
    for row in rows:
        sizes = (
            f"{row[key] / 1e9:.2f}" if key in row else "" for key in ("peak_bytes", "final_bytes")
        )
        figures = (f"{row[key]:.2f}" if key in row else "" for key in keys)
        table.add_row(row["what"], f"{row['bytes'] / 1e9:.2f}", *figures, *sizes)
    return table
