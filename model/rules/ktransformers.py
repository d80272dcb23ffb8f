"""KTransformers' names in rules, and what each becomes: its listing and rule files run as they are.

A rule whose class is one of ``ALIASES`` is written anew with our operator, device and arguments; an
argument that has no counterpart is refused by name. All other rules stay as they are.

Source: KTransformers (SOSP 2025), Listing 1; the arguments of its published rule files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pykernels.errors import PykernelsError

from .schema import Match, Replace, Rule, is_device

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

_PLACES = ("generate_device", "prefill_device", "out_device")


class _Arguments:
    """A rule's kwargs, taken one by one; what is left over is refused."""

    def __init__(self, rule: Rule) -> None:
        self.origin, self.cls = rule.origin, str(rule.replace.cls).rpartition(".")[2]
        self._left, self._known = dict(rule.replace.kwargs), list[str]()

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Any:
        """The value; None where there is none."""
        self._known.append(name)
        return self._left.pop(name, None)

    def choose(self, name: str, values: dict[Any, str]) -> str | None:
        """What the value stands for; names in any case."""
        value = self.take(name)
        if value is None:
            return None
        for known, meaning in values.items():
            if str(known).lower() == str(value).lower():
                return meaning
        raise self.refused(name, value, f"Use {', '.join(map(str, values))}")

    def device(self, name: str) -> str | None:
        value = self.take(name)
        if value is None or value == "cuda":
            return None if value is None else "cuda:0"
        if not is_device(value):
            raise self.refused(name, value, "Write cpu, cuda, or cuda:0 and so on")
        return str(value)

    def refused(self, name: str, value: Any, hint: str) -> PykernelsError:
        return PykernelsError(f"{self.origin}: {self.cls} has no {name} {value!r}", hint)

    def rest(self) -> None:
        """Raises PykernelsError if an argument was not taken."""
        for name in self._left:
            known = ", ".join(self._known)
            raise PykernelsError(f"{self.origin}: {self.cls} has no {name}", f"It has {known}")


def _experts(operator: str) -> Callable[[Rule, _Arguments], Rule]:
    def becomes(rule: Rule, given: _Arguments) -> Rule:
        backend = given.choose("backend", BACKENDS)
        fmt = given.choose("data_type", DATA_TYPES) or backend or "auto"
        if backend not in (None, "auto", fmt):
            found = rule.replace.kwargs["data_type"]
            raise given.refused("data_type", found, f"The backend has {backend}; drop one")
        kwargs: dict[str, Any] = {"format": fmt, "stay": True}
        if deferred := _number(given, "n_deferred_experts"):
            kwargs["defer"] = deferred
        device = given.device("generate_device") or rule.replace.device or "cpu"
        for name in ("prefill_device", "out_device"):
            given.device(name)
        given.choose("generate_op", {"KExpertsCPU": ""})
        given.choose("prefill_op", {"KExpertsTorch": "", "KExpertsCPU": "", "None": ""})
        return _written(rule, operator, device, kwargs)

    return becomes


def _number(given: _Arguments, name: str) -> int:
    """A count, or a list of one."""
    value = given.take(name)
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if one is None:
        return 0
    if type(one) is not int or one < 0:
        raise given.refused(name, value, "Give one number for all steps")
    return one


def _linear(rule: Rule, given: _Arguments) -> Rule:
    fmt = given.choose("data_type", DATA_TYPES)
    op = given.choose("generate_op", LINEAR_OPS)
    given.choose("prefill_op", {**LINEAR_OPS, "None": ""})
    bits = given.choose("num_bits", {4: "int4", 8: "int8"})
    marlin = "Marlin" in given.cls
    fmt = fmt or (bits if op == "int4" else op) or bits or op or ("int4" if marlin else "auto")
    return _written(rule, LINEAR, _one_device(rule, given), {"format": fmt})


def _one_device(rule: Rule, given: _Arguments) -> str | None:
    """The device of a module whose weights are read by prompts and answers alike."""
    found = [given.device(name) for name in _PLACES]
    known = {each for each in (*found, *rule.devices) if each is not None}
    if len(known) > 1:
        raise PykernelsError(
            f"{given.origin}: {given.cls} is on {' and '.join(sorted(known))}",
            "Prompts and answers read the same weights: name one device",
        )
    return next(iter(known), None)


def _placed(holds: str | None = None) -> Callable[[Rule, _Arguments], Rule | None]:
    """The engine has its own of that: of the rule its place is left."""

    def becomes(rule: Rule, given: _Arguments) -> Rule | None:
        device = _one_device(rule, given)
        given.choose("absorb_for_prefill", {True: "", False: ""})
        return None if device is None else _written(rule, None, device, {}, holds)

    return becomes


def _own(rule: Rule, given: _Arguments) -> None:
    """The engine has its own of that, where what is around it is."""
    for name in _PLACES:
        given.device(name)
    if _number(given, "per_layer_prefill_intput_threshold"):
        raise given.refused(
            "per_layer_prefill_intput_threshold",
            rule.replace.kwargs["per_layer_prefill_intput_threshold"],
            "Write 0, and give --prefill stream",
        )
    given.take("transfer_map")  # follows from where the layers are


def _written(
    rule: Rule,
    operator: str | None,
    device: Any,
    kwargs: dict[str, Any],
    holds: str | None = None,
) -> Rule:
    match = rule.match
    found = Rule(
        match=Match.model_validate(
            # Its classes are copies of transformers', in modules of its own.
            {"class": _leaf(match.cls), "name": match.name, "holds": holds or match.holds}
        ),
        replace=Replace.model_validate({"class": operator, "device": device, "kwargs": kwargs}),
        recursive=rule.recursive,
    )
    found._origin = rule.origin
    return found


def _leaf(path: str | None) -> str | None:
    copied = path is not None and path.startswith("ktransformers.")
    return path.rpartition(".")[2] if path is not None and copied else path


Becomes = Callable[[Rule, _Arguments], Rule | None]

ALIASES: dict[str, Becomes] = {
    "experts.FusedMoE": _experts(MOE),
    "experts.KTransformersExperts": _experts(EXPERTS),
    "experts.KTransformersExpertsV2": _experts(EXPERTS),
    "linear.MarlinLinear": _linear,
    "linear.KTransformersLinear": _linear,
    "attention.FlashInferMLA": _placed("mla"),
    "attention.KDeepseekV2Attention": _placed("mla"),
    "attention.KDeepseekV3Attention": _placed("mla"),
    "balance_serve_attention.flashinfer_attn": _placed("mla"),
    "balance_serve_attention.KQwen2MoeAttention": _placed(),
    "balance_serve_attention.KQwen3MoeAttention": _placed(),
    "default": _placed(),
}
"""The end of a class's path -> what becomes of its rule."""

_OWN = ("RoPE.", "gate.", "layernorm.", "mlp.", "models.", "experts.K")
"""What begins the names of the rest of its operators: embeddings of positions, routers, norms,
MLPs, the model, and MoE blocks around their experts."""


def accepted(rules: Iterable[Rule]) -> list[Rule]:
    """Rules in our names.

    Raises:
        PykernelsError: one of KTransformers' operators or arguments that has no counterpart.
    """
    found = (_accept(rule) for rule in rules)
    return [rule for rule in found if rule is not None]


def _accept(rule: Rule) -> Rule | None:
    path = rule.replace.cls
    if path is None:
        return rule
    theirs = path.startswith(("ktransformers.", "operators."))
    end = path.removeprefix("ktransformers.").removeprefix("operators.")
    becomes = ALIASES.get(end) if theirs or end == "default" else _bare(path)
    if becomes is None and theirs and end.startswith(_OWN):
        becomes = _own
    if becomes is None:
        if not theirs:
            return rule
        raise PykernelsError(
            f"{rule.origin}: there is no operator {path!r}",
            f"Of KTransformers' there are {', '.join(ALIASES)}",
        )
    given = _Arguments(rule)
    written = becomes(rule, given)
    given.rest()
    return written


def _bare(name: str) -> Becomes | None:
    """By its last name alone, where it is not ours."""
    if name == "FusedMoE":
        return None
    return next((found for end, found in ALIASES.items() if end.endswith(f".{name}")), None)
