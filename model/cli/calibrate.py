"""`pykernels calibrate`: measure, once a machine, when an expert should use the GEMM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .shared.common import Debug, command, err, note, out, prepare_threads, show
from .shared.execution import Workers

if TYPE_CHECKING:
    from rich.table import Table

    from runtime.profiling.calibrate import Calibration


@command
def calibrate(
    execution: Workers,
    format: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Weight format, may be repeated:", show_default="every one"
        ),
    ] = None,
    activations: Annotated[
        str, typer.Option(metavar="bf16|int8", help="What inputs are multiplied as.")
    ] = "bf16",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure, once a machine, from how many tokens an expert pays to go through the GEMM.

    Seconds a format. The result is kept in the cache folder, where the experts look for it.
    """
    chosen_threads = prepare_threads(execution.threads)
    from pykernels.quant import FORMATS, get_format
    from pykernels.registry import resolve
    from pykernels.target import detect
    from runtime.machine import tuning
    from runtime.machine.topology import Topology
    from runtime.profiling import calibrate as measuring
    from runtime.workers.pool import WorkerPool

    target = detect()
    every = [name for name in FORMATS if activations == "bf16" or FORMATS[name].int8_kind]
    formats = [get_format(name).name for name in dict.fromkeys(format or every)]
    chosen = {fmt: resolve("auto", fmt, target, activations) for fmt in formats}
    backends = {fmt: backend.name for fmt, backend in chosen.items()}
    able = [fmt for fmt in formats if chosen[fmt].gemm_from]
    for backend in {backends[fmt] for fmt in able}:  # an error before anything is timed
        tuning.write(backend, {}, activations)
    calibrations: list[Calibration] = []
    file = None
    usual = Topology.detect().default_threads()
    if able and chosen_threads not in (None, usual):
        note(
            f"measured with --threads {chosen_threads}, where {usual} would be usual, but kept for"
            " any number: calibrate with as many as will run"
        )
    if able:
        with WorkerPool(chosen_threads) as pool, err().status("", spinner_style="dim") as status:
            for fmt in able:
                status.update(f"{fmt}: random experts, compiling …")
                calibrations.append(
                    measuring.calibrate(
                        fmt,
                        pool,
                        backends[fmt],
                        activations,
                        progress=lambda share, fmt=fmt: status.update(f"{fmt}: {share:.0%}"),  # type: ignore[misc]
                    )
                )
                file = tuning.write(backends[fmt], {fmt: calibrations[-1].gemm_from}, activations)
    unable = {fmt: backends[fmt] for fmt in formats if fmt not in able}
    if as_json:
        print(json.dumps(_as_dict(target.cpu, file, calibrations, unable)))
        return
    for calibration in calibrations:
        show(_table(calibration))
        out().print(f"{_decision(calibration)}\n")
    if calibrations:
        out().print(f"Kept in {file}", markup=False)
    if unable:
        names = ", ".join(sorted(set(unable.values())))
        which = "every format" if not able else ", ".join(unable)
        out().print(f"Nothing to calibrate for {which}: kernel {names} has no GEMM")


def _as_dict(
    cpu: str, file: Path | None, calibrations: list[Calibration], unable: dict[str, str]
) -> dict[str, object]:
    """What `--json` prints; `no_gemm` maps formats to their kernel, which has no GEMM."""
    from dataclasses import asdict

    formats = {calibration.fmt: asdict(calibration) for calibration in calibrations}
    return {"cpu": cpu, "file": file and str(file), "formats": formats, "no_gemm": unable}


def _table(calibration: Calibration) -> Table:
    from rich.table import Table

    what = f"{calibration.fmt}, {calibration.activations} activations"
    table = Table(title=f"{what}, {calibration.threads} threads", title_justify="left")
    for heading in ("tokens an expert", "tiles ms", "GEMM ms", "tiles / GEMM", "taken"):
        table.add_column(heading, justify="right")
    for p in calibration.points:
        taken = "GEMM" if p.tokens >= calibration.gemm_from else "tiles"
        times = f"{p.tiles * 1e3:.3f}", f"{p.gemm * 1e3:.3f}", f"{p.ratio:.2f}"
        table.add_row(str(p.tokens), *times, taken)
    return table


def _decision(calibration: Calibration) -> str:
    """The choice and its cost, as a sentence."""
    from runtime.machine.tuning import describe

    decided = describe(calibration.gemm_from)
    if calibration.gemm_from > calibration.points[-1].tokens:
        decided = f"no GEMM below {calibration.gemm_from} tokens an expert"
    return (
        f"{calibration.fmt}: {decided}. Of all thresholds it loses least"
        f" over these rows: {calibration.regret:.1%} against the faster path in every row"
    )
