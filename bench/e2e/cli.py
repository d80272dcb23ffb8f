"""`pykernels bench e2e`: a whole model through the engine, timed on this CPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.cli.shared.common import Debug, Kernel, Threads, command, err, note, out, prepare_threads
from model.cli.shared.session import (
    Defer,
    DenseGib,
    Device,
    DualBatch,
    ExpertCache,
    GpuExperts,
    KvDtype,
    Prefill,
    check_prefill,
    dense_gib_of,
    dual_batch_of,
    expert_cache_of,
)
from model.hub import local
from pykernels.errors import PykernelsError
from pykernels.registry import requested

from ..harness.keeping.provenance import provenance
from .model_options import Arch, Checkpoint, ExpertDevice, Format, Layers, NumExperts, Vocab, count

if TYPE_CHECKING:
    from .ours import Ours

Row = dict[str, Any]
_RANDOM_ONLY = ("format", "layers", "experts", "vocab", "activations")


@command
def e2e(
    model: Checkpoint = None,
    arch: Arch = None,
    layers: Layers = None,
    format: Format = None,
    prompt: Annotated[int, count("Tokens of a prompt.")] = 512,
    tokens: Annotated[int, count("Decode steps.")] = 64,
    batch: Annotated[int, count("Sequences at once.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens in each one's cache before.", show_default="--prompt"
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(metavar="bf16|int8", help="Inputs of the experts.", show_default="bf16"),
    ] = None,
    kv_dtype: KvDtype = "bf16",
    experts: NumExperts = None,
    vocab: Vocab = None,
    device: Device = "cpu",
    expert_device: ExpertDevice = "auto",
    gpu_experts: GpuExperts = None,
    prefill: Prefill = "auto",
    dense_gib: DenseGib = "auto",
    expert_cache: ExpertCache = "off",
    defer: Defer = "off",
    dual_batch: DualBatch = "off",
    threads: Threads = None,
    kernel: Kernel = None,
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
    given = {
        "format": format,
        "layers": layers,
        "experts": experts,
        "vocab": vocab,
        "activations": activations,
    }
    check_options(model, arch, given)
    check_gpu(device, expert_device, gpu_experts)
    check_defer(defer)
    check_prefill(prefill, device)
    slots = expert_cache_of(expert_cache, device)
    dense = dense_gib_of(dense_gib, device)
    lanes = dual_batch_of(dual_batch, device)
    chosen_kernel, chosen_threads = requested(kernel), prepare_threads(threads)
    from runtime.profiling.engine_speed import Load

    load = Load(prompt, tokens, batch, context or prompt)
    with err().status("", spinner_style="dim") as status:
        status.update("filling random weights …" if arch else "reading, packing …")
        ours = open_model(model, arch, given, chosen_threads, chosen_kernel, kv_dtype)
        try:
            status.update("compiling, timing the engine …")
            where = device, expert_device, defer, lanes, gpu_experts, prefill, slots, dense
            row = measured(ours, load, chosen_kernel, chosen_threads, *where)
        finally:
            ours.close()
        del ours  # before the eager model takes its memory
        if eager:
            status.update("timing the eager model …")
            row |= eager_row(model, arch, given, load, chosen_threads, chosen_kernel)
    if as_json:
        print(json.dumps(provenance() | row))
    else:
        _show(row)


def check_options(model: Path | None, arch: str | None, given: dict[str, Any]) -> None:
    """Raises PykernelsError for options that contradict each other."""
    if model is not None and arch is not None:
        raise PykernelsError("--model and --arch are both given", "Leave one of them out")
    if arch is None and (extra := [name for name in _RANDOM_ONLY if given.get(name) is not None]):
        raise PykernelsError(
            f"--{extra[0]} is for random weights; a checkpoint has its own",
            "Add --arch qwen3-30b, or leave it out",
        )
    if model is not None:
        local(model)  # before torch is imported and the bars of a download are hidden


def check_defer(defer: str) -> None:
    """Raises PykernelsError for what is no choice of ``--defer``."""
    if defer not in ("auto", "off") and not defer.isdecimal():
        raise PykernelsError(f"--defer {defer}", "Give a number of experts, auto or off")


def check_gpu(device: str, expert_device: str, gpu_experts: str | None = None) -> None:
    """Raises PykernelsError for a GPU that is not there, or a choice that needs one."""
    from model.pinning.choose import parse

    if parse(gpu_experts) and device == "cpu":
        raise PykernelsError("--gpu-experts without a GPU", "Add --device cuda:0")
    if device != "cpu":
        from runtime.devices.gpus import check_device

        check_device(device)
    elif expert_device != "auto":
        raise PykernelsError(
            f"--expert-device {expert_device} without a GPU", "Add --device cuda:0"
        )


def open_model(
    folder: Path | None,
    arch: str | None,
    given: dict[str, Any],
    threads: int | None,
    kernel: str,
    kv_dtype: str,
) -> Ours:
    """A checkpoint, or random weights, ready to be timed. Raises what loading does."""
    import model

    from .ours import Ours, Shape

    if arch is None:
        folder = model.EMBEDDED if folder is None else local(folder)
        return Ours.checkpoint(folder, threads, kernel, kv_dtype)
    shape = Shape(arch, given["layers"], given["experts"], given["vocab"])
    fmt, activations = given["format"] or "q4_k", given["activations"] or "bf16"
    return Ours.random(shape, fmt, threads, kernel, activations, kv_dtype)


def measured(
    ours: Ours,
    load: Any,
    kernel: str,
    threads: int | None,
    device: str = "cpu",
    expert_device: str = "auto",
    defer: str = "off",
    dual_batch: bool | str = False,
    gpu_experts: str | None = None,
    prefill: str = "auto",
    expert_cache: int | str = "off",
    dense_gib: float | str = "auto",
) -> Row:
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
        "kernel": ours.backend(kernel),
        **asdict(load),
        "device": device,
        "expert_device": expert_device,
        "defer": defer,
        "gpu_experts": gpu_experts or "",
        "prefill": prefill,
        "expert_cache": expert_cache,
        "dense_gib": dense_gib,
        **measure(
            ours,
            load,
            kernel,
            threads,
            device=device,
            expert_device=expert_device,
            defer=defer,
            dual_batch=dual_batch,
            gpu_experts=gpu_experts,
            prefill=prefill,
            expert_cache=0 if expert_cache == "off" else expert_cache,
            dense_gib=dense_gib,
        ),
        "load_seconds": ours.load_seconds,
    }


def eager_row(
    folder: Path | None,
    arch: str | None,
    given: dict[str, Any],
    load: Any,
    threads: int | None,
    kernel: str,
) -> Row:
    """The eager model's figures; for a checkpoint with our experts inside, for an architecture
    transformers' own in bfloat16, or why it is not timed."""
    import model

    from .eager import eager_speed, random_eager
    from .ours import Shape

    if arch is None:
        lm = model.from_pretrained(
            model.EMBEDDED if folder is None else local(folder), threads=threads, kernel=kernel
        )
        name = "transformers' loop, our experts"
    else:
        shape = Shape(arch, given["layers"], given["experts"], given["vocab"])
        try:
            lm, name = random_eager(arch, shape.config()), "transformers, bf16"
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


def _beside_gpu(r: Row) -> str:
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
        "workers": f"busy {r['cpu_busy']:.0%} of the step{_beside_gpu(r)}",
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
    out().print(table)
