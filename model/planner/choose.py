"""Chooses what options leave open, and finds what would fit where nothing does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pykernels.errors import PykernelsError
from runtime.planning.config import CHOSEN, ExecutionConfig
from runtime.planning.placement import CPU

from ..checkpoint.memory import weight_bytes
from .placing import GIB, Placed, placed
from .predict import Prediction, predict
from .settings import Case

FORMATS = ("bf16", "fp8", "q8_0", "q6_k", "q4_k", "iq4_xs", "q3_k", "q2_k", "iq2_xxs")
"""Formats that are proposed, largest first."""
LAYERS = 4
"""Of the model, by which ways are compared: lowering all takes seconds."""
GAIN = 1.1
"""Times as fast as a simpler way that another must be. Predictions are off by some percent, and so
are two measurements of one machine: what is chosen must not change from start to start."""


@dataclass(frozen=True)
class Chosen:
    """What runs where nobody says.

    Attributes:
        execution: with a device and an expert cache, where they were left open.
        why: a line; "": nothing was left open.
    """

    execution: ExecutionConfig
    why: str = ""


def chosen_by_plan(case: Case) -> Chosen:
    """The options of a case with what they leave open chosen by predictions: the device where it
    is "auto", an expert cache where it is None. ``load_engine`` and `pykernels plan` ask here.

    Of two ways the simpler one is taken (the CPU, one GPU, several; no cache), unless the other
    takes a request in ``GAIN`` times less. Prompts and defer are not chosen here: the ways of
    prompts are measured while a model is loaded, and deferring changes the text.
    """
    run, thin = case.execution, replace(case, subject=case.subject.thinned(LAYERS))
    devices = _devices(case) if run.device == CHOSEN else [run.device]
    why, found = "", None
    if len(devices) > 1:
        ways = [_predicted(thin, replace(run, device=device)) for device in devices]
        fitting = [way for way in ways if way is not None]
        found = _simplest(fitting)
        if found is None:  # what does not fit is told by whoever asks for memory
            return Chosen(replace(run, device=devices[-1]), "")
        run = replace(run, device=found.placed.case.execution.device)
        why = _why(found, fitting)
    elif run.device == CHOSEN:
        run, why = replace(run, device=devices[0]), "there is no GPU"
    if not run.on_gpu or not may_cache(run):
        return Chosen(run, why)
    found = found or _predicted(thin, run)
    cached = None
    if found is not None and found.placed.plan.placement.experts == CPU:
        cached = _predicted(thin, replace(run, expert_cache="auto"))
    if found is None or cached is None or not cached.placed.case.slots:
        return Chosen(run, why)
    if _simplest([found, cached]) is found:
        return Chosen(run, why)
    slots = f"with an expert cache {_speeds(cached)}"
    return Chosen(replace(run, expert_cache="auto"), f"{why}; {slots}" if why else slots)


def may_cache(run: ExecutionConfig) -> bool:
    """Whether options leave it open that a GPU has some of the experts, and which."""
    if run.expert_cache is not None or run.gpu_experts not in (None, 0, "0"):
        return False
    return run.experts == "auto" and "," not in run.device and run.prefill in ("auto", CPU)


def is_open(run: ExecutionConfig) -> bool:
    """Whether options leave anything to ``chosen_by_plan``."""
    return run.device == CHOSEN or (run.on_gpu and may_cache(run))


def best(case: Case) -> Prediction:
    """The prediction of a case, with what its options leave open chosen by ``chosen_by_plan``.

    Raises:
        PykernelsError: it does not fit; what would.
    """
    found = placed(replace(case, execution=chosen_by_plan(case).execution))
    if not found.fits:
        raise _too_large(found)
    return predict(found)


def _predicted(case: Case, run: ExecutionConfig) -> Prediction | None:
    """The prediction of a case with other options; None: it does not fit."""
    try:
        found = placed(replace(case, execution=run), whole=True)
    except PykernelsError:  # options that the device does not take
        return None
    return predict(found) if found.fits else None


def _simplest(ways: Sequence[Prediction]) -> Prediction | None:
    """The first one, unless a later one is so much faster."""
    found = ways[0] if ways else None
    for way in ways[1:]:
        if found is None or way.request_s * GAIN <= found.request_s:
            found = way
    return found


def _why(found: Prediction, ways: Sequence[Prediction]) -> str:
    """Speeds of what is chosen and of the best other way."""
    own, others = _speeds(found), [way for way in ways if way is not found]
    if not others:
        return f"predicted are {own}; nothing else has the memory"
    other = min(others, key=lambda way: way.request_s)
    return f"predicted are {own}, and on {other.placed.case.execution.device} {_speeds(other)}"


def _speeds(way: Prediction) -> str:
    return f"{way.decode_tok_s:.1f} tok/s, {way.prompt.tok_s:.0f} of a prompt"


def _devices(case: Case) -> list[str]:
    """From simple to not: the CPU, one GPU, all of them. Settings that are for a GPU leave out the
    CPU."""
    names = case.machine.gpus
    if not names:
        return [CPU]
    gpus = list(dict.fromkeys([*names[:1], ",".join(names)]))
    return gpus if case.execution.for_gpu else [CPU, *gpus]


def _too_large(found: Placed) -> PykernelsError:
    case, needs = found.case, {name: m for name, m in found.memory.items() if m.free < 0}
    told = ", ".join(
        f"{name} needs {m.needed / GIB:.1f} GiB of {m.has / GIB:.1f}" for name, m in needs.items()
    )
    own = weight_bytes(case.subject.fmt)
    weights = sum(m.weights for m in found.memory.values())
    over = sum(-m.free for m in needs.values())
    smaller = [
        fmt
        for fmt in FORMATS
        if weight_bytes(fmt) < own and weights * (1 - weight_bytes(fmt) / own) > over
    ]
    layers = case.subject.config.num_hidden_layers
    memory = sum(m.needed for m in found.memory.values())
    ways = [f"in {smaller[0]}"] if smaller else []
    if max(m.cache for m in found.memory.values()) > over:
        ways.append("with a shorter --context and a smaller --batch")
    ways.append(f"with {memory / GIB / 0.94:.0f} GiB of memory for its {layers} layers")
    hint = f"It would {', or '.join(ways)}{'' if smaller else '; no format of ours is enough'}"
    return PykernelsError(
        f"{case.subject.given} in {case.subject.fmt} does not fit {case.machine.name}: {told}", hint
    )
