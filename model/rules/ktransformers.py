"""KTransformers' names in rules, and what each becomes: its listing and rule files run as they are.

A rule whose class is one of ``ALIASES`` is written anew with our operator, device and arguments; an
argument that has no counterpart is refused by name. Of a rule for what is the engine's own it is
left to check the place. All other rules stay as they are.

Its ``prefill_op`` computes prompts longer than ``per_layer_prefill_intput_threshold``, layer by
layer; that has to be 0 (never), so which one it is makes no difference there either.

Source: KTransformers (SOSP 2025), Listing 1; the arguments of its published rule files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from pykernels.errors import PykernelsError

from .arguments import Arguments
from .schema import Match, Part, Replace, Rule

MOE = "model.modules.moe.FusedMoE"
EXPERTS = "model.modules.moe.FusedExperts"
LINEAR = "model.modules.linear.Linear"

BACKENDS = {
    "hybrid_AMX_AVX512": "auto",
    "llamafile": "auto",
    "AMXBF16": "bf16",
    "AMXInt8": "int8",
    "AMXInt4": "int4",
}
"""Backend -> format of the experts, where no data_type says it. The kernel is the one that suits
the CPU and the number of rows, as the hybrid one is."""

DATA_TYPES = {"BF16": "bf16", "Int8": "int8", "Int4": "int4"}
LINEAR_OPS = {
    "KLinearMarlin": "int4",
    "VLinearMarlin": "int4",
    "KLinearQ8": "int8",
    "KLinearFP8": "fp8",
    "KLinearTorch": "auto",
    "KLinearCPUInfer": "auto",
}
"""What multiplies a linear -> its format. Prompts and answers read the same matrix."""

Becomes = Callable[[Rule, Arguments], list[Rule]]
"""A rule of its own -> ours; none where it asks for what happens anyway."""

_PLACES = ("generate_device", "prefill_device", "out_device")


def _experts(operator: str) -> Becomes:
    def becomes(rule: Rule, given: Arguments) -> list[Rule]:
        backend = given.choose("backend", BACKENDS)
        fmt = given.choose("data_type", DATA_TYPES) or backend or "auto"
        if backend not in (None, "auto", fmt):
            found = rule.replace.kwargs["data_type"]
            raise given.refused("data_type", found, f"The backend has {backend}; drop one")
        kwargs: dict[str, Any] = {"format": fmt, "stay": True}
        if deferred := _number(given, "n_deferred_experts"):
            kwargs["defer"] = deferred
        device = given.device("generate_device") or rule.replace.device or "cpu"
        if device != "cpu":
            hint = "Drop the rule and give --experts gpu, or write cpu"
            raise given.refused("generate_device", device, hint)
        given.choose("generate_op", {"KExpertsCPU": ""})
        given.choose("prefill_op", {"KExpertsTorch": "", "KExpertsCPU": "", "None": ""})
        written = [_written(rule, operator, device, kwargs)]
        layer = _layer_of_experts(given)
        return written if layer is None else [*written, _check(rule, "experts", layer)]

    return becomes


def _layer_of_experts(given: Arguments) -> str | None:
    """Where the layer around experts has to be for what a rule says of prompts and of the sums."""
    prompts, out = given.device("prefill_device"), given.device("out_device")
    if prompts is None or out is None or prompts == out:
        return prompts or out
    hint = "Drop it and give --prefill cpu" if prompts == "cpu" else f"Write {out}"
    raise given.refused("prefill_device", prompts, f"Its out_device is {out}. {hint}")


def _number(given: Arguments, name: str) -> int:
    """A count, or a list of one."""
    value = given.take(name)
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if one is None:
        return 0
    if type(one) is not int or one < 0:
        raise given.refused(name, value, "Give one number for all steps")
    return one


def _linear(rule: Rule, given: Arguments) -> list[Rule]:
    asked = {
        "data_type": given.choose("data_type", DATA_TYPES),
        "num_bits": given.choose("num_bits", {4: "int4", 8: "int8"}),
        "generate_op": given.choose("generate_op", LINEAR_OPS),
    }
    if asked["num_bits"] and asked["generate_op"] == "int4":  # Marlin's, which has both
        asked["generate_op"] = None
    formats = {fmt for fmt in asked.values() if fmt not in (None, "auto")}
    if len(formats) > 1:
        names = " and ".join(name for name, fmt in asked.items() if fmt in formats)
        raise PykernelsError(
            f"{given.origin}: {given.cls} is to be {' and '.join(sorted(map(str, formats)))}",
            f"Drop one of {names}",
        )
    device = _one_device(rule, given)
    op = rule.replace.kwargs.get("generate_op")
    if op == "KLinearCPUInfer" and device not in (None, "cpu"):
        raise given.refused("generate_op", op, f"It is for the CPU, and the linear on {device}")
    # Of prompts layer by layer, which are refused: its value says nothing of any other prompt.
    prompts = {"KLinearTorch": "", "None": ""} | ({} if op is None else {op: ""})
    given.choose("prefill_op", prompts)
    fmt = next(iter(formats), None) or ("int4" if "Marlin" in given.cls else "auto")
    return [_written(rule, LINEAR, device, {"format": fmt})]


def _one_device(rule: Rule, given: Arguments) -> str | None:
    """The device of a module whose weights are read by prompts and answers alike."""
    devices = [given.device(name) for name in _PLACES]
    known = {each for each in (*devices, *rule.devices) if each is not None}
    if len(known) > 1:
        raise PykernelsError(
            f"{given.origin}: {given.cls} is on {' and '.join(sorted(known))}",
            "Prompts and answers read the same weights: name one device",
        )
    return next(iter(known), None)


def _placed(holds: str | None = None) -> Becomes:
    """The engine has its own of that: of the rule its place is left."""

    def becomes(rule: Rule, given: Arguments) -> list[Rule]:
        device = _one_device(rule, given)
        hint = "Write false: keys and values of long prompts are expanded"
        if (absorbed := given.take("absorb_for_prefill")) not in (None, False):
            raise given.refused("absorb_for_prefill", absorbed, hint)
        return [] if device is None else [_written(rule, None, device, {}, holds)]

    return becomes


def _own(part: Part) -> Becomes:
    """The engine has its own of that, where the layer is: of the rule it is left to check that."""

    def becomes(rule: Rule, given: Arguments) -> list[Rule]:
        device = _one_device(rule, given)
        return [] if device is None else [_check(rule, part, device)]

    return becomes


def _model(rule: Rule, given: Arguments) -> list[Rule]:
    """The whole model: prompts layer by layer, and where layers begin on the next device."""
    name = "per_layer_prefill_intput_threshold"
    if threshold := _number(given, name):
        raise given.refused(name, threshold, "Write 0, and give --prefill stream")
    devices = [given.device("device"), _one_device(rule, given)]
    checks = [_check(rule, "model", device) for device in devices if device is not None]
    layers = given.take("transfer_map") or {}
    if not isinstance(layers, dict) or not all(type(layer) is int for layer in layers):
        raise given.refused("transfer_map", layers, "Write numbers of layers and their devices")
    for layer, value in layers.items():
        device = given.as_device("transfer_map", value)
        checks.append(_check(rule, "attention", device, rf"\.layers\.{layer}\."))
    return checks


def _check(rule: Rule, part: Part, device: str, name: str | None = None) -> Rule:
    # Without a class: those of its own models, which transformers has by other names.
    match = Match.model_validate({"name": name or rule.match.name, "part": part})
    replace = Replace.model_validate({"device": device})
    checked = Rule(match=match, replace=replace, check=True)
    checked._origin = rule.origin
    return checked


def _written(
    rule: Rule,
    operator: str | None,
    device: Any,
    kwargs: dict[str, Any],
    holds: str | None = None,
) -> Rule:
    match = rule.match
    written = Rule(
        match=Match.model_validate(
            # Its classes are copies of transformers', in modules of its own.
            {"class": _leaf(match.cls), "name": match.name, "holds": holds or match.holds}
        ),
        replace=Replace.model_validate({"class": operator, "device": device, "kwargs": kwargs}),
        recursive=rule.recursive,
    )
    written._origin = rule.origin
    return written


def _leaf(path: str | None) -> str | None:
    copied = path is not None and path.startswith("ktransformers.")
    return path.rpartition(".")[2] if path is not None and copied else path


ALIASES: dict[str, Becomes] = {
    "experts.FusedMoE": _experts(MOE),
    "experts.KTransformersExperts": _experts(EXPERTS),
    "experts.KTransformersExpertsV2": _experts(EXPERTS),
    "experts.KGlm4Experts": _experts(EXPERTS),
    "linear.MarlinLinear": _linear,
    "linear.KTransformersLinear": _linear,
    "attention.FlashInferMLA": _placed("mla"),
    "attention.KDeepseekV2Attention": _placed("mla"),
    "attention.KDeepseekV3Attention": _placed("mla"),
    "attention.KLlamaAttention": _placed(),
    "attention.KQwen3MoeAttention": _placed(),
    "balance_serve_attention.flashinfer_attn": _placed("mla"),
    "balance_serve_attention.KQwen2MoeAttention": _placed(),
    "balance_serve_attention.KQwen3MoeAttention": _placed(),
    "balance_serve_attention.KGlm4MoeAttention": _placed(),
    "default": _placed(),
}
"""The end of a class's path -> what becomes of its rule."""

_OWN: tuple[tuple[str, Becomes], ...] = (
    (r"RoPE\..*RotaryEmbedding(V\d)?", _own("rotary")),
    (r"gate\.K\w*Gate", _own("router")),
    (r"layernorm\.\w*RMSNorm", _own("norm")),
    (r"mlp\.[Kk]\w*MLP", _own("mlp")),
    (r"models\.K\w*Model", _model),
    (r"experts\.K\w*(MoE|Mo[eE]Block)(V2)?", _own("block")),
)
"""Ends of the paths of the rest of its operators: embeddings of positions, routers, norms, MLPs,
the model, and MoE blocks around their experts."""


def accepted(rules: Iterable[Rule]) -> list[Rule]:
    """Rules in our names.

    Raises:
        PykernelsError: one of KTransformers' operators or arguments that has no counterpart.
    """
    return [found for rule in rules for found in _accept(rule)]


def _accept(rule: Rule) -> list[Rule]:
    path = rule.replace.cls
    if path is None:
        return [rule]
    theirs = path.startswith(("ktransformers.", "operators."))
    end = path.removeprefix("ktransformers.").removeprefix("operators.")
    becomes = ALIASES.get(end) if theirs or end == "default" else _bare(path)
    if becomes is None and theirs:
        becomes = next((own for pattern, own in _OWN if re.fullmatch(pattern, end)), None)
    if becomes is None:
        if not theirs:
            return [rule]
        raise PykernelsError(
            f"{rule.origin}: there is no operator {path!r}",
            f"Of KTransformers' there are {', '.join(ALIASES)}",
        )
    given = Arguments(rule)
    written = becomes(rule, given)
    given.rest()
    return written


def _bare(name: str) -> Becomes | None:
    """What becomes of a class known by its last name alone, where it is not ours."""
    if name == "FusedMoE":
        return None
    return next((becomes for end, becomes in ALIASES.items() if end.endswith(f".{name}")), None)
