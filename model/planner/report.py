"""A prediction as text, as the line that starts a server so, and as JSON's types."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.devices.sim.drafts import DraftForecast
from runtime.engine.scheduling.config import CONTEXT
from runtime.planning.placement import CPU

from .changes import Change
from .placing import GIB
from .predict import Prediction


def serve_line(found: Prediction, drafts: DraftForecast) -> str:
    """The command that serves the model as it was predicted, with drafts where they pay."""
    case, run = found.placed.case, found.placed.case.execution
    given = case.subject.given if case.subject.is_checkpoint else f"PATH-OF-{case.subject.given}"
    words = ["pykernels", "serve", "--model", given]
    words += ["--device", run.device]
    if run.device != CPU:
        words += ["--experts", "cpu" if found.placed.plan.placement.experts == CPU else "gpu"]
    if run.gpus != "auto":
        words += ["--gpus", run.gpus]
    if run.gpu_shares != "auto":
        words += ["--gpu-shares", run.gpu_shares]
    if case.slots:
        words += ["--expert-cache", str(run.slots or case.slots)]
    if deferred := found.placed.plan.deferred:
        words += ["--defer", str(deferred)]
    if run.kv_dtype != "bf16":
        words += ["--kv-dtype", run.kv_dtype]
    if run.prefill != "auto":
        words += ["--prefill", run.prefill]
    if run.gpu_gib is not None:
        words += ["--gpu-gib", f"{run.gpu_gib:g}"]
    if run.kv_attention != "auto":
        words += ["--kv-attention", run.kv_attention]
    for name, value in (("--kv-gpu-gib", run.kv_gpu_gib), ("--dense-gib", run.dense_gib)):
        if value != "auto":
            words += [name, f"{value:g}"]
    if run.threads is not None:
        words += ["--threads", str(run.threads)]
    if case.wanted.positions > CONTEXT:
        words += ["--max-model-len", str(case.wanted.positions)]
    if found.placed.kv_tokens:
        words += ["--kv-tokens", str(found.placed.kv_tokens)]
    if case.wanted.batch > 16:
        words += ["--max-batch", str(case.wanted.batch)]
    if drafts.pays and not drafts.why_none:
        words += ["--draft", "auto"]
    return shlex.join(words)


def lines(found: Prediction, drafts: DraftForecast, changes: Sequence[Change]) -> list[str]:
    """The lines that ``pykernels plan`` prints of a prediction, of drafts and of changes to it."""
    case, plan = found.placed.case, found.placed.plan
    wanted, subject = case.wanted, case.subject
    layers = subject.config.num_hidden_layers
    text = [
        f"{subject.given} in {subject.fmt}, {layers} layers, from {subject.source};"
        f" on {case.machine.name}",
        "",
        "placement   " + _placement(found),
    ]
    for name, memory in found.placed.memory.items():
        text.append(
            f"memory      {name}: {memory.needed / GIB:.1f} of {memory.has / GIB:.1f} GiB"
            f" (weights {memory.weights / GIB:.1f}, cache {memory.cache / GIB:.1f},"
            f" steps {memory.steps / GIB:.1f})"
        )
    prompt, step = found.prompt, found.decode
    way = {
        "cpu": ", experts on the CPU",
        "stream": ", all experts cross",
        "split": ", the experts that most tokens take cross",
    }.get(prompt.way, "")
    text += [
        f"decode      {found.decode_tok_s:.1f} tok/s, {step.seconds * 1e3:.2f} ms a step at a"
        f" context of {wanted.context}"
        + (f", {wanted.batch} sequences" if wanted.batch > 1 else ""),
        f"            bound by {_shares(step.bounds, step.seconds)}",
        f"drafts      {drafts.choice}",
        *([f"            {drafts.cost}"] if drafts.cost else []),
        f"prompt      {prompt.tok_s:.0f} tok/s of {wanted.prompt} tokens in {prompt.steps}"
        f" step{'s' * (prompt.steps > 1)}{way}",
        f"            bound by {_shares(prompt.bounds, prompt.seconds)}",
        f"first token {found.first_token_s:.3g} s",
        "",
        serve_line(found, drafts),
    ]
    text += [f"({line})" for line in plan.decisions if line.startswith("defer")]
    if plan.deferred:
        text.append("(experts are deferred: the text is another one)")
    if changes:
        text += ["", "What would gain most, of a prompt and its answer:"]
        text += [
            f"  {change.gain:.2f} x  {change.text}"
            f" (decode {change.decode:.2f} x, prompt {change.prompt:.2f} x)"
            for change in changes
        ]
    return text


def as_dict(found: Prediction, drafts: DraftForecast, changes: Sequence[Change]) -> dict[str, Any]:
    """For JSON."""
    case = found.placed.case
    wanted = case.wanted
    return {
        "model": case.subject.given,
        "format": case.subject.fmt,
        "source": case.subject.source,
        "layers": case.subject.config.num_hidden_layers,
        "machine": case.machine.name,
        "device": case.execution.device,
        "experts": found.placed.plan.placement.experts,
        "context": wanted.context,
        "batch": wanted.batch,
        "prompt": wanted.prompt,
        "deferred": found.placed.plan.deferred,
        "memory_gib": {
            name: {
                "has": round(m.has / GIB, 2),
                "weights": round(m.weights / GIB, 2),
                "cache": round(m.cache / GIB, 2),
                "steps": round(m.steps / GIB, 2),
            }
            for name, m in found.placed.memory.items()
        },
        "decode_tok_s": round(found.decode_tok_s, 2),
        "us_per_step": round(found.decode.seconds * 1e6, 1),
        "decode_us_by_bound": _rounded(found.decode.bounds),
        "drafts": {
            "why_none": drafts.why_none,
            "times_as_long": [round(each, 3) for each in drafts.times],
            "break_even": [each and round(each, 3) for each in drafts.break_even],
            "auto": "off" if drafts.why_none or not drafts.pays else "ngram",
            "most_gain": round(drafts.best[1], 3),
        },
        "prompt_tok_s": round(found.prompt.tok_s, 1),
        "prompt_way": found.prompt.way,
        "prompt_us_by_bound": _rounded(found.prompt.bounds),
        "first_token_s": round(found.first_token_s, 5),
        "serve": serve_line(found, drafts),
        "changes": [
            {
                "change": change.text,
                "gain": round(change.gain, 3),
                "decode": round(change.decode, 3),
                "prompt": round(change.prompt, 3),
            }
            for change in changes
        ],
    }


def _rounded(bounds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds * 1e6, 1) for name, seconds in bounds.items()}


def _shares(bounds: Mapping[str, float], seconds: float) -> str:
    """What bounds a step, the largest part first."""
    ranked = sorted(bounds.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {took / seconds:.0%}" for name, took in ranked if took / seconds >= 0.02
    )


def _placement(found: Prediction) -> str:
    run, placement = found.placed.case.execution, found.placed.plan.placement
    if run.device == CPU:
        return "all on the CPU"
    if placement.experts != CPU:
        return f"all on {run.device}"
    slots = found.placed.case.slots
    beside = f", {slots} of each layer's in slots on the GPU" if slots else ""
    return f"attention, dense layers and shared experts on {run.device}, experts on the CPU{beside}"
