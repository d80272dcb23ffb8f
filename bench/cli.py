"""`pykernels bench moe|attention|linear|router`: one kernel timed, on this CPU or a GPU.

`e2e`, a whole model through the engine, is in `bench.e2e.cli`; `load`, its weights, in
`bench.load.cli`; `prefill`, prompts beside experts in main memory, in `bench.prefill.cli`; `cache`,
a GPU's cache of experts, in `bench.cache.cli`; `serve`, a server under load, in
`bench.serving.cli`.

`model.cli.main` offers these commands where this package is installed. `moe` on the CPU is the
measurement of `bench/cpu`; on a GPU all four time one case of `bench/gpu`, of whose `case()` (or
`Size`) the options are the arguments.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from model.cli.common import Debug, Kernel, Numa, Threads, command, err, out, prepare_threads
from model.cli.formats import ListsFormats
from pykernels.errors import PykernelsError
from pykernels.registry import requested

from .cache.cli import cache
from .e2e.cli import e2e
from .e2e.mixed import mixed
from .harness.provenance import provenance
from .load.cli import load
from .prefill.cli import prefill
from .serving.cli import serve

if TYPE_CHECKING:
    from runtime.profiling.measure import MoEMeasurement

    from .against.checked import Checked

app = typer.Typer(no_args_is_help=True, help="Time the kernels on this machine.")
app.command(cls=ListsFormats)(e2e)
app.command(cls=ListsFormats)(mixed)
app.command(cls=ListsFormats)(load)
app.command(cls=ListsFormats)(cache)
app.command(cls=ListsFormats)(prefill)
app.command()(serve)

AsJson = Annotated[
    bool, typer.Option("--json", help="One flat JSON object on stdout, nothing else.")
]
Device = Annotated[str, typer.Option("--device", metavar="cuda:N", help="Which GPU.")]

SECONDS = 0.1
"""How long a GPU's case, and each of its peers, is timed."""


def _count(help: str, default: str | bool = True) -> typer.models.OptionInfo:
    return typer.Option(min=1, metavar="N", help=help, show_default=default)


def _text(choices: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(metavar=choices, help=help)


@app.command(cls=ListsFormats)
@command
def moe(
    format: Annotated[str, _text("NAME", "Weight format:")] = "fp8",
    tokens: Annotated[int, _count("Tokens in one call.")] = 1,
    hidden: Annotated[
        int | None, _count("Width of the model.", "7168; with --against 2048")
    ] = None,
    inter: Annotated[int | None, _count("Width of an expert.", "2048; with --against 1024")] = None,
    experts: Annotated[int, _count("Experts in the layer.")] = 32,
    topk: Annotated[int, _count("Experts a token uses.")] = 8,
    routing: Annotated[
        str,
        _text(
            "balanced|zipf|one",
            "Tokens over experts, the same FLOPs: as many for each; rank r drawn with weight"
            " 1/(r+1); all the same.",
        ),
    ] = "balanced",
    activations: Annotated[
        str | None,
        _text(
            "bf16|int8|fp8",
            "Inputs of the products: as they are (default), or quantized for each token: on the CPU"
            " int8 (integer formats only; about 1 % off), on a GPU fp8 (fp8 weights only, and the"
            " default there with many tokens an expert).",
        ),
    ] = None,
    threads: Threads = None,
    kernel: Kernel = None,
    numa: Numa = "auto",
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda:N", help="The CPU's kernels or a GPU's.")
    ] = "cpu",
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="First compare a small layer with the reference; exit code 1 if wrong."
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="COMMIT",
            help="Time a commit's kernel (HEAD, say) in turns with the one of this source tree,"
            " instead of the roofs.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time the routed experts of one MoE layer on random weights and routing."""
    hidden, inter = hidden or (2048 if against else 7168), inter or (1024 if against else 2048)
    if device != "cpu":
        if check or against:
            raise PykernelsError(
                "--check and --against are the CPU's",
                f"Leave them out with --device {device}; tests/gpu compare with the reference",
            )
        if threads or kernel is not None or numa != "auto" or activations == "int8":
            raise PykernelsError(
                "--threads, --kernel, --numa and --activations int8 are the CPU's",
                f"Leave them out with --device {device}",
            )
        flags: dict[str, int | str] = {
            "format": format,
            "tokens": tokens,
            "hidden": hidden,
            "inter": inter,
            "experts": experts,
            "topk": topk,
            "routing": routing,
            "activations": "auto" if activations is None else activations,
        }
        return run_case("moe", device, as_json, flags)
    if activations == "fp8":
        raise PykernelsError("--activations fp8 are a GPU's", "Add --device cuda:0, or use bf16")
    chosen_kernel, chosen_threads = requested(kernel), prepare_threads(threads)
    from pykernels.shapes import MoEShape

    shape = MoEShape(E=experts, H=hidden, I=inter, topk=topk)
    if against:
        case = {
            "fmt": format,
            "tokens": tokens,
            "shape": {"E": experts, "H": hidden, "I": inter, "topk": topk},
            "threads": chosen_threads,
            "kernel": chosen_kernel,
            "routing": routing,
            "activations": activations or "bf16",
            "numa": numa,
        }
        return _time_against(against, case, check, as_json)
    from runtime.profiling.measure import measure_moe

    checked = _check(format, chosen_kernel, activations or "bf16", as_json) if check else {}
    with err().status("filling random experts, compiling …", spinner_style="dim") as status:
        measured = measure_moe(
            format,
            tokens,
            shape,
            chosen_threads,
            chosen_kernel,
            routing,
            "bf16" if activations is None else activations,
            numa,
            filling=lambda share: status.update(f"filling random experts, {share:.0%}"),
            progress=lambda share: status.update(f"timing, {share:.0%}"),
        )
    if as_json:
        print(json.dumps(provenance() | checked | measured.as_dict()))
    else:
        _show(measured)


@app.command()
@command
def attention(
    kind: Annotated[
        str,
        _text(
            "mla_decode|mla_prefill|gqa_decode|gqa_prefill", "Latent or grouped-query attention."
        ),
    ] = "mla_decode",
    batch: Annotated[int, _count("Sequences.")] = 1,
    context: Annotated[int, _count("Tokens in the cache of each.")] = 8192,
    heads: Annotated[int, _count("Query heads.")] = 128,
    kv_heads: Annotated[int, _count("Key and value heads (gqa).")] = 8,
    head_dim: Annotated[int, _count("Width of a head (gqa).")] = 128,
    format: Annotated[str, _text("bf16|fp8", "Of the cache.")] = "bf16",
    window: Annotated[
        int, typer.Option(min=0, metavar="N", help="Sliding window (gqa); 0: none.")
    ] = 0,
    new: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="New tokens; 0: one of a decode, all of a prefill."),
    ] = 0,
    keys: Annotated[
        str, _text("rows|pages", "Where a gqa_prefill's keys lie; those of fp8 are in pages.")
    ] = "rows",
    device: Device = "cuda:0",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time attention over a paged cache on the GPU, against its roofs and torch."""
    flags: dict[str, int | str] = {
        "kind": kind,
        "batch": batch,
        "context": context,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "format": format,
        "window": window,
        "new": new,
        "keys": keys,
    }
    run_case("attention", device, as_json, flags)


@app.command()
@command
def linear(
    format: Annotated[str, _text("NAME", "Weight format, as `bench moe` names them.")] = "int4",
    tokens: Annotated[int, _count("Rows of the input.")] = 1,
    activations: Annotated[
        str,
        _text("auto|bf16|fp8", "Inputs of the product; auto: fp8 for many rows of fp8 weights."),
    ] = "auto",
    inputs: Annotated[int, _count("Width of the input.")] = 7168,
    outputs: Annotated[int, _count("Width of the output.")] = 7168,
    device: Device = "cuda:0",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time a quantized linear layer on the GPU, against its roofs and torch."""
    flags: dict[str, int | str] = {
        "format": format,
        "tokens": tokens,
        "activations": activations,
        "inputs": inputs,
        "outputs": outputs,
    }
    run_case("linear", device, as_json, flags)


@app.command()
@command
def router(
    kind: Annotated[
        str, _text("v3|v2|softmax|sigmoid", "DeepSeek's grouped routers, or one group.")
    ] = "v3",
    tokens: Annotated[int, _count("Tokens in one call.")] = 1,
    experts: Annotated[int, _count("Experts in the layer.")] = 256,
    topk: Annotated[int, _count("Experts a token uses.")] = 8,
    hidden: Annotated[int, _count("Width of the model.")] = 7168,
    device: Device = "cuda:0",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time the router and the tokens' sort by expert on the GPU, against torch."""
    flags: dict[str, int | str] = {
        "kind": kind,
        "tokens": tokens,
        "experts": experts,
        "topk": topk,
        "hidden": hidden,
    }
    run_case("router", device, as_json, flags)


def run_case(op: str, device: str, as_json: bool, flags: dict[str, int | str]) -> None:
    """Time one case of `bench/cases` and print its row.

    Raises:
        PykernelsError: the device is no GPU of this machine, or there is no such case.
    """
    import torch

    if op != "moe" and device.startswith("cuda") and not torch.cuda.is_available():
        raise PykernelsError(
            f"bench {op} times a GPU's kernels, and this PyTorch sees no CUDA GPU",
            "Install a CUDA build of PyTorch and the driver, or run it where there is a GPU",
        )
    if not device.startswith("cuda"):
        raise PykernelsError(f"bench {op} has no kernel for {device}", "Give it --device cuda:0")
    from .harness.machine import check_gpu
    from .harness.report import line

    gpu = check_gpu(device)
    from .cases.gpu_run import one_case  # needs Triton, which is where a GPU is

    row = one_case(op, flags, gpu, SECONDS)
    print(json.dumps(provenance() | row) if as_json else line(row), flush=True)


def _check(fmt: str, kernel: str, activations: str, as_json: bool) -> dict[str, float]:
    """Compares a kernel with the reference and says so; exit code 1 where it is wrong."""
    from .against.check import check_moe

    with err().status("comparing with the reference …", spinner_style="dim"):
        found = check_moe(fmt, kernel, activations)
    return _tell_checked(found, as_json)


def _tell_checked(found: Checked, as_json: bool) -> dict[str, float]:
    from .against.checked import TOKENS

    row: dict[str, float] = {"error": found.error, "error_bound": found.bound}
    if not as_json:
        word, style = ("right", "green") if found.right else ("wrong", "bold red")
        text = f"relative error {found.error:.2g}, {found.bound:.2g} allowed"
        calls = f"calls of {', '.join(map(str, TOKENS))} tokens"
        where = calls if found.right else f"{calls}; this one of {found.tokens}"
        out().print(f"[{style}]{word}[/]  {text} ({where}; against pykernels.ref)", highlight=False)
    elif not found.right:
        print(json.dumps(provenance() | row))
    if not found.right:
        raise typer.Exit(1)
    return row


def _time_against(revision: str, case: dict[str, object], check: bool, as_json: bool) -> None:
    """Times a case here and in a commit, and prints both."""
    from .against.run import ROUNDS, run

    checked: dict[str, float] = {}

    def tell(found: Checked) -> None:
        checked.update(_tell_checked(found, as_json))

    with err().status("starting …", spinner_style="dim") as status:
        both = run(revision, case, tell if check else None, status.update)
    if as_json:
        print(json.dumps(provenance() | checked | both.as_dict()))
        return
    before, now = (
        f"{gbps:.2f} GB/s, {tflops:.3f} TFLOP/s"
        for gbps, tflops in ((both.gbps_before, both.tflops_before), (both.gbps, both.tflops))
    )
    out().print(
        f"before {before} ({both.revision})\nnow    {now} ({both.kernel},"
        f" {both.threads} thread{'s' * (both.threads > 1)})\nratio  {both.ratio:.3f},"
        f" {both.ratio_low:.3f} to {both.ratio_high:.3f} in {ROUNDS} rounds in turns",
        highlight=False,
    )


def _show(measured: MoEMeasurement) -> None:
    from rich.table import Table

    m = measured
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    nodes = f" on {m.numa_nodes} NUMA nodes" if m.numa_nodes > 1 else ""
    busiest = (
        "" if m.routing == "balanced" else f", the busiest has {m.busiest_over_mean:.1f} x mean"
    )
    compute = f"not measured: no loop for kernel {m.kernel}"
    if m.compute_roof_instruction:
        compute = (
            f"{m.compute_roof_tflops:.2f} TFLOP/s on registers alone"
            f" ({m.compute_roof_instruction}); share of it {m.compute_roof_share:.0%}"
        )
    rows = {
        "CPU": f"{m.cpu}, {m.threads} thread{'s' * (m.threads > 1)}{nodes}",
        "kernel": f"{m.format} on {m.kernel}, {m.activations} activations",
        "layer": f"{m.experts} experts of {m.hidden} x {m.inter}, top-{m.topk}",
        "routing": f"{m.routing}: {m.distinct_experts:g} experts active{busiest}",
        "call": f"{m.tokens} token{'s' * (m.tokens > 1)}, {m.mbytes_per_call:.1f} MB of distinct"
        " experts",
        "time": f"{m.us_median:.1f} µs median, p10 {m.us_p10:.1f}, p90 {m.us_p90:.1f}, of {m.calls}"
        " calls",
        "speed": f"{m.gbps:.2f} GB/s, {m.tflops:.3f} TFLOP/s",
        "read roof": f"{m.roof_gbps:.2f} GB/s, timed in turns; share of it {m.roof_share:.0%}",
        "compute roof": compute,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    out().print(table)
