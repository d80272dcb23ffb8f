"""`pykernels bench moe|attention|linear|router`: one kernel timed, on this CPU or a GPU.

`e2e`, a whole model through the engine, is in `bench.e2e.cli`; `load`, its weights, in
`bench.load.cli`; `prefill`, prompts with experts in main memory, in `bench.prefill.cli`;
`contexts`, decode at growing contexts, in `bench.contexts.cli`; `drafts`, steps that check drafts,
in `bench.drafts.cli`; `cache`, a GPU's cache of experts, in `bench.cache.cli`; `restart`, a
conversation that outlives the process, in `bench.restart.cli`; `serve`, a server under load, in
`bench.serving.cli`; `dslp`, `disagg` and `tensor`, several GPUs, in `bench.several_gpus`.

`model.cli.app` offers these commands where this package is installed. `moe` on the CPU is the
measurement of `bench/cpu`; on a GPU all four time one case of `bench/gpu`, of whose `case()` (or
`Size`) the options are the arguments.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from model.cli.shared.common import Debug, command, err, show
from model.cli.shared.execution import settled
from model.cli.shared.formats import ListsFormats
from model.cli.shared.options import Choose
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from .against.cli import Against, Check, check_case, time_against, time_on_cpu
from .cache.cli import cache
from .contexts.cli import contexts
from .drafts.cli import drafts
from .e2e.cli import e2e
from .e2e.command import OneOrSeveral
from .harness.keeping.provenance import provenance
from .kernel_options import Attention, Flags, Linear, MoELayer, Router
from .load.cli import load
from .mixed.cli import mixed
from .prefill.cli import prefill
from .restart.cli import restart
from .serving.cli import serve
from .several_gpus.disagg.cli import disagg
from .several_gpus.dslp.cli import dslp
from .several_gpus.tensor.cli import tensor

if TYPE_CHECKING:
    from runtime.profiling.measure import MoEMeasurement

app = typer.Typer(
    no_args_is_help=True, help="Time kernels, whole models, loading and servers on this machine."
)
app.command(cls=OneOrSeveral)(e2e)
app.command(cls=ListsFormats)(mixed)
app.command(cls=ListsFormats)(load)
app.command(cls=ListsFormats)(cache)
app.command(cls=ListsFormats)(prefill)
app.command(cls=ListsFormats)(contexts)
app.command(cls=ListsFormats)(drafts)
app.command(cls=ListsFormats)(restart)
app.command(cls=ListsFormats)(dslp)
app.command(cls=ListsFormats)(disagg)
app.command(cls=ListsFormats)(tensor)
app.command()(serve)

AsJson = Annotated[
    bool, typer.Option("--json", help="One flat JSON object on stdout, nothing else.")
]

CpuOrGpu = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda:N",
        help="Which GPU; cpu: the CPU's kernel on one thread, with --check or --against.",
        show_default="cuda:0; with --check or --against cpu",
    ),
]
SECONDS = 0.1
"""How long a GPU's case, and each of its peers, is timed."""


@app.command(cls=ListsFormats)
@command
def moe(
    layer: MoELayer,
    execution: Annotated[ExecutionConfig, Choose(only=("threads", "kernel", "numa"))],
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda:N", help="The CPU's kernels or a GPU's.")
    ] = "cpu",
    check: Check = False,
    against: Against = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time the routed experts of one MoE layer on random weights and routing."""
    hidden = layer.hidden or (2048 if against else 7168)
    inter = layer.inter or (1024 if against else 2048)
    if device != "cpu":
        if check or against:
            raise PykernelsError(
                "--check and --against are the CPU's",
                f"Leave them out with --device {device}; tests/gpu compare with the reference",
            )
        if execution != ExecutionConfig() or layer.activations == "int8":
            raise PykernelsError(
                "--threads, --kernel, --numa and --activations int8 are the CPU's",
                f"Leave them out with --device {device}",
            )
        return run_case("moe", device, as_json, replace(layer, hidden=hidden, inter=inter).flags())
    if layer.activations == "fp8":
        raise PykernelsError("--activations fp8 are a GPU's", "Add --device cuda:0, or use bf16")
    execution = settled(execution)
    from pykernels.shapes import MoEShape

    shape = MoEShape(E=layer.experts, H=hidden, I=inter, topk=layer.topk)
    fmt, activations = layer.format, layer.activations or "bf16"
    if against:
        case = {
            "op": "moe",
            "fmt": fmt,
            "tokens": layer.tokens,
            "shape": {"E": shape.E, "H": hidden, "I": inter, "topk": shape.topk},
            "threads": execution.threads,
            "kernel": execution.kernel,
            "routing": layer.routing,
            "activations": activations,
            "numa": str(execution.numa),
        }
        return time_against(against, case, check, as_json)
    from runtime.profiling.measure import measure_moe

    small = {"fmt": fmt, "kernel": execution.kernel, "activations": activations}
    checked = check_case({"op": "moe", **small}, as_json) if check else {}
    with err().status("filling random experts, compiling …", spinner_style="dim") as status:
        measured = measure_moe(
            fmt,
            layer.tokens,
            shape,
            execution.threads,
            execution.kernel,
            layer.routing,
            activations,
            str(execution.numa),
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
    case: Attention,
    device: CpuOrGpu = None,
    check: Check = False,
    against: Against = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time attention over a paged cache on a GPU, against its roofs and torch; or the CPU's,
    against a commit's."""
    time_op("attention", device, check, against, as_json, asdict(case))


@app.command()
@command
def linear(
    case: Linear,
    device: CpuOrGpu = None,
    check: Check = False,
    against: Against = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time a quantized linear layer on a GPU, against its roofs and torch; or the CPU's, against a
    commit's."""
    time_op("linear", device, check, against, as_json, asdict(case))


@app.command()
@command
def router(
    case: Router,
    device: CpuOrGpu = None,
    check: Check = False,
    against: Against = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time the router and the tokens' sort by expert on a GPU, against torch; or the CPU's router
    alone, against a commit's."""
    time_op("router", device, check, against, as_json, asdict(case))


def time_op(
    op: str,
    device: str | None,
    check: bool,
    against: str | None,
    as_json: bool,
    flags: Flags,
) -> None:
    """One case on a GPU, or the CPU's kernel compared with the reference and with a commit's.

    Raises:
        PykernelsError: options that contradict each other, or there is no such case.
    """
    if not check and against is None:
        return run_case(op, device or "cuda:0", as_json, flags)
    if device not in (None, "cpu"):
        raise PykernelsError(
            "--check and --against are the CPU's",
            f"Leave them out with --device {device}; tests/gpu compare with the reference",
        )
    return time_on_cpu(op, check, against, as_json, flags)


def run_case(op: str, device: str, as_json: bool, flags: Flags) -> None:
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
        raise PykernelsError(
            f"bench {op} has no kernel for {device}",
            "Give it --device cuda:0; or --against HEAD, which times the CPU's in turns",
        )
    from .harness.machine import check_gpu
    from .harness.report import line

    gpu = check_gpu(device)
    from .cases.gpu_run import one_case  # needs Triton, which is where a GPU is

    row = one_case(op, flags, gpu, SECONDS)
    print(json.dumps(provenance() | row) if as_json else line(row), flush=True)


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
    show(table)
