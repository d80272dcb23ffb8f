"""`pykernels generate`: the text to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError
from runtime.engine.scheduling.config import EngineConfig

from ..startup.standard_streams import argument_text
from .shared.common import Debug, command, err, note
from .shared.execution import Chosen
from .shared.model_options import DRAFTS, Dtype, Eager, Model, Rules, Sampling
from .shared.session import Session, check_stdin, read_stdin, status, summary

if TYPE_CHECKING:
    from ..text.generate import GenerationStats


@command
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to go on from; - reads it from stdin.")
    ],
    sampling: Sampling,
    execution: Chosen,
    engine: Annotated[EngineConfig, DRAFTS],
    model: Model = None,
    rules: Rules = None,
    dtype: Dtype = None,
    eager: Eager = False,
    echo: Annotated[bool, typer.Option(help="Write the prompt before its continuation.")] = True,
    debug: Debug = False,
) -> None:
    """Go on from PROMPT and stream the text; one summary line ends it."""
    if prompt == "-":
        check_stdin()
        prompt = read_stdin(sys.stdin.read)
    else:
        prompt = argument_text(prompt)
    session = Session(model, rules, dtype, eager, execution, engine, sampling, prompt)
    _, stats = session.write(prompt, echo)
    err().print(summary(stats, _read_roof(session, stats)), style="dim", markup=False)
    if session.llm is not None and (cache := session.llm.expert_cache) is not None:
        note(
            f"{cache.hit_rate:.0%} of the experts that decode steps chose were in the GPU's slots;"
            f" {cache.swaps} came into them"
        )


def _read_roof(session: Session, stats: GenerationStats) -> float | None:
    """GB/s that the cores read from memory, measured today; None where a step's weights fit into
    the caches, and, with a note, beside a model that fills the memory."""
    from pykernels.target import detect
    from runtime.profiling.roofline import kept_read_roof
    from runtime.workers.pool import default_pool

    if stats.read_bytes_per_step <= detect().l3:
        return None
    try:
        with status("measuring the read roof"):
            threads = (session.llm.pool if session.llm else default_pool()).threads
            return kept_read_roof(threads, default_pool, stats.read_gb_per_second)
    except PykernelsError as error:
        note(f"no share of the read roof: {error}")
        return None
