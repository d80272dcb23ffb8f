"""`pykernels profile experts`: which experts a text takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pykernels.errors import PykernelsError

from ...extras import check_plot
from ..shared.common import Debug, command, err, out
from ..shared.execution import WorkersKernel, opened_with
from ..shared.model_options import Model, Rules


@command
def experts(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Files of UTF-8 text.")],
    execution: WorkersKernel,
    model: Model = None,
    write: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the counts go.")
    ] = Path("profile.json"),
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw them too, as .png or .svg.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, metavar="L", help="Tokens of one piece.")] = 512,
    rules: Rules = None,
    debug: Debug = False,
) -> None:
    """Count which experts of each layer TEXT takes; --gpu-experts reads what is written."""
    check_plot(plot)
    text = "\n".join(_read(file) for file in texts)
    path, execution = opened_with(execution, model)
    from rich.progress import Progress

    from ... import from_pretrained, load_tokenizer
    from ...pinning import plot as plots
    from ...pinning import profile

    console = err()
    ids = load_tokenizer(path)(text)["input_ids"]
    lm = from_pretrained(path, rules, threads=execution.threads, kernel=execution.kernel)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("counting", total=len(ids))
        counted = profile.count(lm, ids, length, lambda n: bar.advance(task, n))
    profile.write(counted, write)
    if plot is not None:
        plots.heatmap(counted, plot)
    half, tenth = counted.coverage(0.5), counted.coverage(0.1)
    out().print(
        f"{counted.tokens} tokens, {len(counted.counts)} layers of {len(counted.rows[0])} experts,"
        f" top-{counted.topk}: the most used half takes {half:.0%} of the choices, the most used"
        f" tenth {tenth:.0%}"
    )
    for file in (write, plot):
        if file is not None:
            console.print(f"wrote {file}", style="dim", markup=False)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PykernelsError(
            f"{file} cannot be read: {error.strerror}", "Give files of text"
        ) from None
    except UnicodeDecodeError:
        raise PykernelsError(f"{file} is no UTF-8 text", "Convert it first") from None
