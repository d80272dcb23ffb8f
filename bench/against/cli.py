"""`--check` and `--against` of `pykernels bench`: is a kernel of the CPU right, and how fast?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from bench.harness.keeping.provenance import provenance
from model.cli.shared.common import err, out, prepare_threads
from pykernels.errors import PykernelsError
from pykernels.registry import requested

if TYPE_CHECKING:
    from .checked import Checked

Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="First compare small calls of the CPU's kernel with the reference; exit code 1 if"
        " wrong.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="COMMIT",
        help="Time the CPU's kernel of a commit (HEAD, say) in turns with the one of this source"
        " tree, instead of the roofs.",
    ),
]

GPU_ONLY = {"keys": "rows", "hidden": 7168}
"""Options that the CPU's cases have not, and their defaults."""


def time_on_cpu(
    op: str, check: bool, against: str | None, as_json: bool, flags: dict[str, int | str]
) -> None:
    """A case of the CPU's kernel compared with the reference, with a commit's, or with both.

    Raises:
        PykernelsError: there is no such case.
    """
    for name, default in GPU_ONLY.items():
        if flags.get(name, default) != default:
            raise PykernelsError(f"--{name} is of a GPU's case", "Leave it out, or --check too")
    kept = {name: value for name, value in flags.items() if name not in GPU_ONLY}
    case: dict[str, object] = {"op": op, **kept}
    if op == "linear":
        if case["activations"] == "fp8":
            raise PykernelsError("--activations fp8 are a GPU's", "Use bf16 or int8")
        case["activations"] = "bf16" if case["activations"] == "auto" else case["activations"]
        case["kernel"] = requested()
    prepare_threads(1)
    if against is not None:
        return time_against(against, case, check, as_json)
    errors = check_case(case, as_json)
    if as_json:
        print(json.dumps(provenance() | case | errors))


def check_case(case: dict[str, object], as_json: bool) -> dict[str, float]:
    """Compares a kernel with the reference and says so; exit code 1 where it is wrong."""
    from .check import check

    with err().status("comparing with the reference …", spinner_style="dim"):
        checked = check(case)
    return tell_checked(checked, as_json)


def tell_checked(checked: Checked, as_json: bool) -> dict[str, float]:
    from .checked import TOKENS

    row: dict[str, float] = {"error": checked.error, "error_bound": checked.bound}
    if not as_json:
        word, style = ("right", "green") if checked.right else ("wrong", "bold red")
        text = f"relative error {checked.error:.2g}, {checked.bound:.2g} allowed"
        calls = f"calls of {', '.join(map(str, TOKENS))} tokens"
        where = calls if checked.right else f"{calls}; this one of {checked.tokens}"
        out().print(f"[{style}]{word}[/]  {text} ({where}; against pykernels.ref)", highlight=False)
    elif not checked.right:
        print(json.dumps(provenance() | row))
    if not checked.right:
        raise typer.Exit(1)
    return row


def time_against(revision: str, case: dict[str, object], check: bool, as_json: bool) -> None:
    """Times a case here and in a commit, and prints both."""
    from .run import ROUNDS, run

    checked: dict[str, float] = {}

    def tell(found: Checked) -> None:
        checked.update(tell_checked(found, as_json))

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
