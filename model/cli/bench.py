"""`pykernels bench moe`: the expert FFN of one layer, timed; the same measurement as bench/'s."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError
from pykernels.registry import requested

from .bench_gpu import run_case
from .common import Debug, Kernel, Numa, Threads, command, err, out, prepare_threads

if TYPE_CHECKING:
    from runtime.profiling.measure import MoEMeasurement


@command
def moe(
    format: Annotated[str, typer.Option(metavar="NAME", help="Weight format:")] = "fp8",
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens in one call.")] = 1,
    hidden: Annotated[int, typer.Option(min=1, metavar="N", help="Width of the model.")] = 7168,
    inter: Annotated[int, typer.Option(min=1, metavar="N", help="Width of an expert.")] = 2048,
    experts: Annotated[int, typer.Option(min=1, metavar="N", help="Experts in the layer.")] = 32,
    topk: Annotated[int, typer.Option(min=1, metavar="N", help="Experts a token uses.")] = 8,
    routing: Annotated[
        str,
        typer.Option(
            metavar="balanced|zipf|one",
            help="Tokens over experts, the same FLOPs: as many for each; rank r drawn with weight"
            " 1/(r+1); all the same.",
        ),
    ] = "balanced",
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|int8|fp8",
            help="Inputs of the products: as they are (default), or quantized for each token: on"
            " the CPU int8 (integer formats only; about 1 % off), on a GPU fp8 (fp8 weights only,"
            " and the default there with many tokens an expert).",
        ),
    ] = None,
    threads: Threads = None,
    kernel: Kernel = None,
    numa: Numa = "auto",
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda:N", help="The CPU's kernels or a GPU's.")
    ] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="One flat JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Time the routed experts of one MoE layer on random weights and routing."""
    if device != "cpu":
        if threads or kernel is not None or numa != "auto" or activations == "int8":
            raise PykernelsError(
                "--threads, --kernel, --numa and --activations int8 are the CPU's",
                f"Leave them out with --device {device}",
            )
        flags: dict[str, int | str] = {
            "format": format, "tokens": tokens, "hidden": hidden, "inter": inter,
            "experts": experts, "topk": topk, "routing": routing,
            "activations": "auto" if activations is None else activations,
        }  # fmt: skip
        return run_case("moe", device, as_json, flags)
    if activations == "fp8":
        raise PykernelsError("--activations fp8 are a GPU's", "Add --device cuda:0, or use bf16")
    chosen_kernel, chosen_threads = requested(kernel), prepare_threads(threads)
    from pykernels.shapes import MoEShape
    from runtime.profiling.measure import measure_moe

    shape = MoEShape(E=experts, H=hidden, I=inter, topk=topk)
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
        print(json.dumps(measured.as_dict()))
    else:
        _show(measured)


def _show(measured: MoEMeasurement) -> None:
    from rich.table import Table

    m = measured
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    nodes = f" on {m.numa_nodes} NUMA nodes" if m.numa_nodes > 1 else ""
    table.add_row("CPU", f"{m.cpu}, {m.threads} thread{'s' * (m.threads > 1)}{nodes}")
    table.add_row("kernel", f"{m.format} on {m.kernel}, {m.activations} activations")
    table.add_row("layer", f"{m.experts} experts of {m.hidden} x {m.inter}, top-{m.topk}")
    crowd = "" if m.routing == "balanced" else f", the busiest has {m.busiest_over_mean:.1f} x mean"
    table.add_row("routing", f"{m.routing}: {m.distinct_experts:g} experts active{crowd}")
    table.add_row(
        "call",
        f"{m.tokens} token{'s' * (m.tokens > 1)}, {m.mbytes_per_call:.1f} MB of distinct experts",
    )
    table.add_row(
        "time",
        f"{m.us_median:.1f} µs median, p10 {m.us_p10:.1f}, p90 {m.us_p90:.1f}, of {m.calls} calls",
    )
    table.add_row("speed", f"{m.gbps:.2f} GB/s, {m.tflops:.3f} TFLOP/s")
    table.add_row(
        "read roof", f"{m.roof_gbps:.2f} GB/s, timed in turns; share of it {m.roof_share:.0%}"
    )
    if m.compute_roof_instruction:
        roof = f"{m.compute_roof_tflops:.2f} TFLOP/s on registers alone"
        table.add_row(
            "compute roof",
            f"{roof} ({m.compute_roof_instruction}); share of it {m.compute_roof_share:.0%}",
        )
    else:
        table.add_row("compute roof", f"not measured: no loop for kernel {m.kernel}")
    out().print(table)
