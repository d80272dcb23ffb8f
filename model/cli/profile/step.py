"""`pykernels profile step`: what a step's time goes to, as a trace, a picture and figures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig
from runtime.planning.option import option

from ...extras import check_plot, is_installed
from ...startup.lean_import import import_transformers
from ..shared.common import Debug, command, err, note, out, show
from ..shared.execution import settled
from ..shared.model_options import MODEL_HELP, MODEL_METAVAR, Rules, model_path
from ..shared.options import Choose

if TYPE_CHECKING:
    from runtime.tracing.usage import Usage

    from ...step_profile import Recorded

ARCHS = "qwen3-30b|qwen3.6-35b|qwen3-next-80b|mixtral-8x7b|deepseek-v2-lite|deepseek-v3"
SHOWN = 12
"""Rows of the table of ops."""


def _count(help: str) -> typer.models.OptionInfo:
    return typer.Option(min=1, metavar="N", help=help)


@dataclass(frozen=True)
class Which:
    """A checkpoint, or random weights in its place."""

    model: Path | None = option(
        None, MODEL_HELP, MODEL_METAVAR, kind=Path, shown="the embedded model"
    )
    arch: str | None = option(None, "Random weights of that shape instead.", ARCHS)
    layers: int | None = option(None, "Of --arch: so many of its layers.", "N", kind=int, least=1)
    format: str | None = option(None, "Of --arch: weight format:", "NAME", shown="q4_k")

    def check(self, rules: Path | None) -> None:
        """Raises PykernelsError for options that contradict each other."""
        for name, value in (("--model", self.model), ("--rules", rules)):
            if self.arch is not None and value is not None:
                raise PykernelsError(f"{name} and --arch are both given", "Leave one of them out")
        for name, given in (("--layers", self.layers), ("--format", self.format)):
            if self.arch is None and given is not None:
                raise PykernelsError(
                    f"{name} is for random weights; a checkpoint has its own",
                    "Add --arch qwen3-30b",
                )


@command
def step(
    which: Which,
    execution: Annotated[ExecutionConfig, Choose(but=("prefill",), defaults={"defer": "off"})],
    rules: Rules = None,
    steps: Annotated[int, _count("Decode steps that are recorded.")] = 5,
    prefill: Annotated[
        int, typer.Option(min=0, metavar="N", help="Record a prompt of N tokens too.")
    ] = 0,
    batch: Annotated[int, _count("Sequences at once.")] = 1,
    context: Annotated[int, _count("Tokens in each one's cache before.")] = 256,
    write: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", help="The trace, for ui.perfetto.dev: .json or .json.gz."
        ),
    ] = Path("step.json"),
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The picture, by matplotlib.", show_default="the trace's, as .png"
        ),
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--pass",
            metavar="FILE.py:NAME",
            help="A pass of your own, Program -> Program, for decode steps; repeat it for more.",
            show_default="none",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The figures as one JSON object on stdout.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Record some steps: what each worker, stream and copy does when, and how busy they are."""
    which.check(rules)
    if rules is None:
        execution.check_device()
    if execution.on_gpu:
        from runtime.devices.gpus import check_device

        check_device(execution.device)
    files = _written(write, plot)
    path = None if which.arch else model_path(which.model)
    execution = settled(execution)
    with err().status("loading, compiling, recording …", spinner_style="dim"):
        import_transformers()
        from runtime.extend import read_pass
        from runtime.profiling.engine_speed import Load
        from runtime.tracing.perfetto import write_trace
        from runtime.tracing.plot import draw
        from runtime.tracing.usage import usage

        from ...step_profile import Subject, profile_steps

        subject = Subject(
            path=path,
            arch=which.arch,
            layers=which.layers,
            fmt=which.format or "q4_k",
            rules=rules,
            execution=execution,
            passes=tuple(read_pass(each) for each in own or ()),
        )
        recorded = profile_steps(subject, Load(prefill, steps, batch, context))
        write_trace(recorded.timeline, write)
        for picture in files[1:]:
            draw(recorded.timeline, picture)
    usages = [usage(recorded.timeline, kind) for kind in ("prefill", "decode")]
    kinds = [each for each in usages if each is not None]
    if as_json:
        figures = {each.kind: asdict(each) for each in kinds}
        print(json.dumps({"title": recorded.timeline.title, **figures}))
    else:
        _show(recorded, kinds)
    for file in files:
        err().print(f"wrote {file}", style="dim", markup=False)


def _written(trace: Path, plot: Path | None) -> list[Path]:
    """The trace, and the picture if it can be drawn.

    Raises:
        PykernelsError: their folder is not there; before minutes are spent.
    """
    check_plot(plot)
    files = [trace, plot or Path(str(trace).removesuffix(".gz")).with_suffix(".png")]
    if not is_installed("matplotlib"):
        note("there is no picture beside the trace, because matplotlib is not installed")
        files.pop()
    for file in files:
        if not file.parent.is_dir():
            raise PykernelsError(f"{file.parent} is no folder", "Make it, or give another --out")
    return files


def _show(recorded: Recorded, kinds: list[Usage]) -> None:
    from rich.table import Table

    console = out()
    console.print(recorded.timeline.title, style="bold", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("share of the time", style="cyan", no_wrap=True)
    for each in kinds:
        table.add_column(each.kind, justify="right")
    rows: dict[str, list[str]] = {}
    for each in kinds:
        usages = {
            "steps": f"{each.steps}",
            "ms a step, mean": f"{each.us / 1e3:.3f}",
            "a CPU worker computes": f"{each.cpu:.1%}",
            "mean of all workers": f"{each.workers:.1%}",
            **{f"{device} computes": f"{share:.1%}" for device, share in each.streams.items()},
            "both": f"{each.both:.1%}",
            "neither": f"{each.neither:.1%}",
            "copies between devices": f"{each.copies:.1%}",
            "engine's Python": f"{each.engine:.1%}",
        }
        if not each.streams:
            usages = {
                k: v for k, v in usages.items() if k not in ("both", "copies between devices")
            }
        for name, text in usages.items():
            rows.setdefault(name, []).append(text)
    for name, texts in rows.items():
        table.add_row(name, *texts)
    show(table)
    for each in kinds:
        _show_ops(each)
        if each.kind == "decode":
            console.print(
                f"median of a recorded step: {each.median_us:.0f} µs, of one that is not recorded:"
                f" {recorded.untraced_us:.0f} µs",
                style="dim",
            )


def _show_ops(used: Usage) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(f"op, {used.kind}", style="cyan", no_wrap=True)
    for name in ("on", "µs a step", "share", "summed over lanes", "tasks"):
        table.add_column(name, justify="right")
    for op in used.ops[:SHOWN]:
        table.add_row(
            op.op,
            op.where,
            f"{op.us:.0f}",
            f"{op.us / used.us:.1%}",
            f"{op.lane_us:.0f}",
            f"{op.spans:.0f}",
        )
    out().print()
    show(table)
