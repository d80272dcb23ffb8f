"""`pykernels bench e2e`: a whole model through the engine, timed on this CPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.cli.shared.common import Debug, command, err, note, show
from model.cli.shared.execution import settled
from model.hub import local
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from ..harness.keeping.provenance import provenance
from .model_options import HOW_EXPERTS, ModelOptions, count

if TYPE_CHECKING:
    from .ours import Ours

Row = dict[str, Any]


@command
def e2e(
    chosen: ModelOptions,
    execution: Annotated[ExecutionConfig, HOW_EXPERTS],
    prompt: Annotated[int, count("Tokens of a prompt.")] = 512,
    tokens: Annotated[int, count("Decode steps.")] = 64,
    batch: Annotated[int, count("Sequences at once.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens in each one's cache before.", show_default="--prompt"
        ),
    ] = None,
    eager: Annotated[
        bool,
        typer.Option("--eager", help="Also time the eager model, in transformers' own loop."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One flat JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Time prompts and decode of a whole model through the engine, against the read roof.

    With a GPU, bytes and roof are those of the experts on the CPU. Several models, and peers in
    turns with ours: --archs, --formats, --peers and others, shown below.
    """
    chosen.check()
    check_gpu(execution)
    execution = settled(execution)
    from runtime.profiling.engine_speed import Load

    load = Load(prompt, tokens, batch, context or prompt)
    with err().status("", spinner_style="dim") as status:
        status.update(chosen.doing)
        ours = open_model(chosen, execution)
        try:
            status.update("compiling, timing the engine …")
            row = measured(ours, load, execution)
        finally:
            ours.close()
        del ours  # before the eager model takes its memory
        if eager:
            status.update("timing the eager model …")
            row |= eager_row(chosen, load, execution)
    if as_json:
        print(json.dumps(provenance() | row))
    else:
        _show(row)


def check_gpu(execution: ExecutionConfig, needed: bool = False) -> None:
    """Raises PykernelsError for a GPU that is not there, or a choice that needs one.

    Args:
        needed: nothing can be timed on a CPU instead.
    """
    execution.check_device()
    if execution.device != "cpu":
        from runtime.devices.gpus import check_device

        try:
            check_device(execution.device)
        except PykernelsError as error:
            if not needed:
                raise
            hint = "Run it where there is one, with its driver and torch's CUDA build"
            raise PykernelsError(error.cause, hint) from None


def open_model(
    chosen: ModelOptions, execution: ExecutionConfig, positions: int = 1, settings: str = ""
) -> Ours:
    """A checkpoint, or random weights, ready to be timed. Raises what loading does.

    Args:
        positions: that random weights have at least, whatever their shape was made for.
        settings: options that make a sequence shorter, where they are not those of ``bench e2e``.
    """
    import model

    from .ours import Ours, Shape

    if chosen.arch is None:
        folder = model.EMBEDDED if chosen.model is None else local(chosen.model)
        ours = Ours.checkpoint(folder, execution)
    else:
        shape = Shape(chosen.arch, chosen.layers, chosen.experts, chosen.vocab, positions)
        fmt, activations = chosen.format or "q4_k", chosen.activations or "bf16"
        ours = Ours.random(shape, fmt, execution, activations)
    ours.settings = settings or ours.settings
    return ours


def described(execution: ExecutionConfig) -> Row:
    """Where nodes are, and how, in a row."""
    return {
        "device": execution.device,
        "expert_device": execution.experts,
        "defer": str(execution.defer),
        "gpu_experts": "" if execution.gpu_experts is None else execution.gpu_experts,
        "prefill": execution.prefill,
        "expert_cache": execution.expert_cache or "off",
        "dense_gib": execution.dense_gib,
        "kv_gpu_gib": execution.kv_gpu_gib,
        "gpu_gib": "" if execution.gpu_gib is None else execution.gpu_gib,
    }


def measured(ours: Ours, load: Any, execution: ExecutionConfig) -> Row:
    """The flat row of one run."""
    from pykernels.target import detect

    from .ours import measure

    return {
        "model": ours.name,
        "format": ours.fmt,
        "activations": ours.activations,
        "kv_dtype": ours.decoder.kv_dtype,
        "layers": ours.layers,
        "threads": ours.pool.threads,
        "cpu": detect().cpu,
        "kernel": ours.backend(execution.kernel),
        **asdict(load),
        **described(execution),
        **measure(ours, load, execution),
        "load_seconds": ours.load_seconds,
    }


def eager_row(chosen: ModelOptions, load: Any, execution: ExecutionConfig) -> Row:
    """The eager model's figures; for a checkpoint with our experts inside, for an architecture
    transformers' own in bfloat16, or why it is not timed."""
    import model

    from .eager import eager_speed, random_eager
    from .ours import Shape

    if chosen.arch is None:
        folder = model.EMBEDDED if chosen.model is None else local(chosen.model)
        lm = model.from_pretrained(folder, threads=execution.threads, kernel=execution.kernel)
        name = "transformers' loop, our experts"
    else:
        shape = Shape(chosen.arch, chosen.layers, chosen.experts, chosen.vocab)
        try:
            lm, name = random_eager(chosen.arch, shape.config()), "transformers, bf16"
        except PykernelsError as error:
            note(f"no eager model: {error}")
            return {"eager": "", "why_eager": str(error)}
    speed = eager_speed(lm, load.prompt, load.tokens, load.batch, load.context)
    return {"eager": name, **speed}


def _cache_line(row: Row) -> dict[str, str]:
    if "cache_slots" not in row:
        return {}
    text = f"{row['cache_slots']} slots of all layers; {row['cache_hit_rate']:.0%} of the choices"
    return {"expert cache": f"{text} in decode steps were in them"}


def _roof_lines(r: Row) -> dict[str, str]:
    """How near a step comes to the read roof, unless the caches hold what it reads."""
    from pykernels.target import detect

    outside = f"{r['python_us_per_step']:.0f} µs a step outside the jobs"
    roof = f"{r['roof_gbps']:.2f} GB/s, timed before and after"
    if r["bytes_per_step"] <= detect().l3:
        return {"read roof": f"{roof}; a step's bytes fit into the caches", "beyond": outside}
    return {
        "read roof": f"{roof}; share of it {r['roof_share']:.0%}",
        "beyond": f"{r['us_per_layer']:.1f} µs a layer beyond its bytes at the roof; {outside}",
    }


def _gpu_busy(r: Row) -> str:
    """What the CPU's workers and a GPU do to each other, where there is one."""
    if r["device"] == "cpu":
        return f"; {r['deferred']} experts deferred" if r["deferred"] else ""
    return (
        f"; {r['wait_us_per_layer']:.1f} µs a layer waiting for the GPU; {r['deferred']} experts"
        f" deferred; {r['cached_experts']}, of all layers, on the GPU"
    )


def _show(row: Row) -> None:
    from rich.table import Table

    r = row
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    several = f"{r['batch']} sequences, " if r["batch"] > 1 else ""
    rows = {
        "CPU": f"{r['cpu']}, {r['threads']} thread{'s' * (r['threads'] > 1)}",
        "model": f"{r['model']}, {r['layers']} layers, experts in {r['format']} on {r['kernel']},"
        f" {r['activations']} activations, cache in {r['kv_dtype']}",
        "prompt": f"{r['prefill_tok_s']:.1f} tokens/s, {r['prompt']} tokens",
        "decode": f"{r['decode_tok_s']:.1f} tokens/s, {several}{r['tokens']} steps at a context of"
        f" {r['context']}",
        "step": f"{r['us_per_step']:.0f} µs median, p10 {r['us_p10']:.0f}, p90 {r['us_p90']:.0f};"
        f" {r['bytes_per_step'] / 1e6:.1f} MB",
        "speed": f"{r['gbps']:.2f} GB/s",
        **_roof_lines(r),
        "workers": f"busy {r['cpu_busy']:.0%} of the step{_gpu_busy(r)}",
        **_cache_line(r),
        "made in": f"{r['load_seconds']:.1f} s loading and packing,"
        f" {r['warmup_seconds']:.1f} s compiling and warming up",
    }
    if r.get("eager"):
        rows["eager"] = (
            f"{r['eager']}: prompt {r['eager_prefill_tok_s']:.1f}, decode"
            f" {r['eager_decode_tok_s']:.1f} tokens/s"
        )
    for name, value in rows.items():
        table.add_row(name, value)
    show(table)
