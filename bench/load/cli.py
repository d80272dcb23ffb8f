"""`pykernels bench load`: loading, timed beside plain reading of the same files."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from model.cli.shared.common import Debug, command, err, note, prepare_threads
from model.cli.shared.execution import Workers
from model.cli.shared.options import Choose
from model.hub import local
from pykernels.env import env

from ..e2e.model_options import ModelOptions, count
from ..harness.keeping.kept import AsJson, Save, keeping

_MODEL = Choose(
    but=("activations",),
    help={
        "arch": "A random checkpoint of that shape instead.",
        "format": "Of --arch's files: bf16 or fp8 safetensors, else GGUF (q8_0, q4_k ...).",
    },
    shown={"format": "bf16"},
)


@command
def load(
    chosen: Annotated[ModelOptions, _MODEL],
    execution: Workers,
    convert: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Format of the packed experts.", show_default="as they are stored"
        ),
    ] = None,
    rounds: Annotated[int, count("Turns, of which the fastest counts.")] = 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the files in PYKERNELS_CACHE_DIR/load.")
    ] = False,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time reading, loading and mapping a model's weights, with cold and with warm files.

    Cold: the files' pages were put out of memory (posix_fadvise); a disk or a hypervisor may still
    have a cache of its own. Weights alone count: headers, reading, packing.
    """
    chosen.check()
    count_ = prepare_threads(execution.threads)
    from model import EMBEDDED
    from runtime.machine.topology import Topology

    from ..e2e.ours import Shape
    from .checkpoint import write_checkpoint
    from .run import PEER, Loads, PeerMissing, ToolMissing, llama_cpp

    count_ = count_ or Topology.detect().default_threads()
    home = env.cache_dir / "load"
    home.mkdir(parents=True, exist_ok=True)
    folder = home if keep else Path(tempfile.mkdtemp(dir=home))
    try:
        with (
            keeping("load", save, as_json) as kept,
            err().status("", spinner_style="dim") as status,
        ):
            arch, fmt = chosen.arch, chosen.format or "bf16"
            source = EMBEDDED if chosen.model is None else local(chosen.model)
            given = {k: getattr(chosen, k) for k in ("format", "layers", "experts", "vocab")}
            name = "-".join([arch or source.name, *(f"{k[0]}{v}" for k, v in given.items() if v)])
            config = None
            if arch is not None:
                status.update("writing the checkpoint …")
                config = Shape(arch, chosen.layers, chosen.experts, chosen.vocab).config()
                source = write_checkpoint(config, fmt, folder, name)
            packed = folder / f"{name}.{convert or 'stored'}.packed"

            def step(what: str) -> None:
                status.update(f"{what} …")

            kept.head = {"model": name, "threads": count_}
            loads = Loads(source, packed, count_, convert, rounds)
            kept.plan = [*loads.plan, *([{"what": PEER}] if config is not None else [])]
            for row in loads.rows(step):
                kept.add(row)
            if config is not None:
                try:
                    kept.add(llama_cpp(config, fmt, folder, name, count_, step))
                except (PeerMissing, ToolMissing) as error:
                    note(f"llama.cpp is not timed: {error}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
