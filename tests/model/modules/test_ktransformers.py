"""KTransformers' listing and the names of its rule files, through the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import model
from model.modules.inject import inject
from model.modules.placement import place
from model.opened import followed
from model.rules import parse_rules, resolve_rules
from pykernels.errors import PykernelsError

from ..checks import Checkpoints, logits
from ..families.test_logprobs import EXACT, GAINS, MEDIAN, MOST, errors
from . import ktransformers_rules as shipped
from .test_inject import meta

LISTING = r"""
- match:
    class: modeling_deepseek_v3.DeepseekV3MoE
  replace:
    class: operators.experts.FusedMoE
    device: "cpu"
    kwargs:
      backend: "hybrid_AMX_AVX512"
      data_type: "Int4"
      n_deferred_experts: 6

- match:
    name: "^model\\.layers\\..*\\.self_attn$"
  replace:
    class: operators.attention.FlashInferMLA
    device: "cuda:0"

- match:
    name: "^(?!lm_head$).*$"
    class: torch.nn.Linear
  replace:
    class: operators.linear.MarlinLinear
    device: "cuda:0"
    kwargs:
      data_type: "Int4"
"""
"""Listing 1 of KTransformers (SOSP 2025)."""

SIZES: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "num_experts_per_tok": 8,
    "topk_group": 4,
}
"""Inputs in multiples of what int4 takes on a GPU; as many experts a token as the listing's."""
OURS = [
    {
        "match": {"class": "DeepseekV3MoE"},
        "replace": {"class": "model.modules.moe.FusedMoE", "kwargs": {"format": "int4"}},
    },
    {
        "match": {"class": "torch.nn.Linear", "name": "^(?!lm_head$).*$"},
        "replace": {"class": "model.modules.linear.Linear", "kwargs": {"format": "int4"}},
    },
]
"""The same in our names, without where it runs and deferral."""


def written(path: Path, rules: Any, device: str = "ref", **settings: Any) -> list[int]:
    """Greedy tokens; the device "ref" stands for those that rules name."""
    with model.load_engine(path, rules=rules, device=device, **settings) as llm:
        result = llm.generate([1, 2, 3], temperature=0, max_tokens=12, ignore_eos=True)
    return list(result.completions[0].token_ids)


def test_the_papers_listing_writes_what_our_own_options_write(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoint("deepseek_v3", **SIZES).path
    file = tmp_path / "listing.yaml"
    file.write_text(LISTING)
    found = written(path, file)
    assert found == written(path, OURS, defer=6)
    assert found != written(path, OURS)
    on_cpu = tmp_path / "cpu.yaml"
    on_cpu.write_text(LISTING.replace("cuda:0", "cpu"))
    assert written(path, on_cpu, "cpu") == written(path, OURS, "cpu", defer=6)
    # What is asked for by name goes before the rules.
    assert written(path, file, defer="off") == written(path, OURS)


@pytest.mark.parametrize(
    ("place", "median", "most"), [("ref", EXACT, EXACT), ("cpu", MEDIAN, MOST)]
)
def test_without_deferral_its_logprobs_are_those_of_transformers(
    place: str, median: float, most: float, checkpoint: Checkpoints
) -> None:
    """Of 103 tokens of a prompt and 24 that are drawn: two tokens may be nearer to each other than
    what bfloat16 rounds, so that tokens alone say nothing after the first such pair."""
    tiny = checkpoint("deepseek_v3", compressed="int4", gains=GAINS, **SIZES)
    rules = yaml.safe_load(LISTING.replace("cuda:0", "cpu") if place == "cpu" else LISTING)
    rules[0]["replace"]["kwargs"]["n_deferred_experts"] = 0
    prompt = torch.randint(2, 96, (104,), generator=torch.Generator().manual_seed(3)).tolist()
    with model.load_engine(tiny.path, rules=rules, device=place) as llm:
        how: Any = {"temperature": 0, "ignore_eos": True, "logprobs": 20, "logprob_start": 1}
        [found] = llm.generate(prompt, max_tokens=24, **how).completions
    reference = copy.deepcopy(tiny.reference)
    config = reference.config
    for name, matrix in reference.named_parameters():
        if "kv_b_proj" in name:  # what makes keys of latents is turned, and so in bfloat16
            heads = matrix.data.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys = heads[:, : config.qk_nope_head_dim]
            keys.copy_(keys.bfloat16().float())
    truth = logits(reference, torch.tensor([[*prompt, *found.token_ids[:-1]]]))[0].log_softmax(-1)
    error = errors((*found.prompt_logprobs, *found.logprobs), truth)
    assert len(error) == 127
    assert error.median() <= median
    assert error.max() <= most


PLACES = {"generate_device": "cuda", "prefill_device": "cuda"}


def theirs(match: Any, cls: str, recursive: bool = True, **kwargs: Any) -> dict[str, Any]:
    replace = {"class": cls, "kwargs": {**PLACES, **kwargs}}
    return {"match": match, "replace": replace, "recursive": recursive}


def test_the_rules_of_its_files_become_ours() -> None:
    """Experts in a block, linears by name, attention, an embedding on the CPU, and what the engine
    has its own of."""
    rules = resolve_rules(
        [
            theirs({"name": "rotary"}, "ktransformers.operators.RoPE.YarnRotaryEmbeddingV3"),
            theirs(
                {"name": r"^model\.layers\.(?!.*kv_b_proj).*$", "class": "torch.nn.Linear"},
                "ktransformers.operators.linear.KTransformersLinear",
                generate_op="KLinearMarlin",
                prefill_op="KLinearTorch",
            ),
            theirs(
                {
                    "name": r"\.mlp$",
                    "class": "ktransformers.models.m.DeepseekV3MoE",
                },
                "ktransformers.operators.experts.KDeepseekV3MoE",
            ),
            theirs(
                {"name": r"^model\.layers\..*\.mlp\.experts$"},
                "ktransformers.operators.experts.KTransformersExperts",
                recursive=False,
                generate_device="cpu",
                generate_op="KExpertsCPU",
                prefill_op="KExpertsTorch",
                out_device="cuda",
                backend="AMXInt8",
                n_deferred_experts=[1],
            ),
            theirs(
                {"name": r"\.self_attn$"}, "ktransformers.operators.attention.KDeepseekV2Attention"
            ),
            theirs(
                {"name": "^model$"},
                "ktransformers.operators.models.KDeepseekV2Model",
                per_layer_prefill_intput_threshold=0,
            ),
            theirs(
                {"name": "^model.embed_tokens"},
                "default",
                generate_device="cpu",
                prefill_device="cpu",
            ),
        ],
        "deepseek_v3",
    )
    lm = meta(**SIZES)
    replaced = {each.name: each.operator for each in inject(lm, rules)}
    experts: Any = replaced["model.layers.1.mlp.experts"]
    assert (experts.format, experts.defer, experts.stay) == ("int8", 1, True)
    linear: Any = replaced["model.layers.0.self_attn.o_proj"]
    assert (linear.format, linear.placed) == ("int4", "cuda:0")
    assert "model.layers.0.self_attn.kv_b_proj" not in replaced
    where = place(lm, rules, "cuda:0")
    assert where.of("model.layers.0.self_attn.kv_b_proj.weight") == "cuda:0"
    assert where.of("model.embed_tokens.weight") == "cpu"


MOE = {"match": {"class": "DeepseekV3MoE"}}
REFUSED = [
    ("experts.FusedMoE", {"backend": "FP9"}, "rule 1: FusedMoE has no backend 'FP9'. Use hybrid_"),
    ("experts.FusedMoE", {"data_type": "Int3"}, "no data_type 'Int3'. Use BF16, Int8, Int4"),
    ("experts.FusedMoE", {"backend": "AMXInt8", "data_type": "Int4"}, "The backend has int8"),
    ("experts.FusedMoE", {"n_deferred_experts": [2, 4]}, "Give one number for all steps"),
    ("experts.FusedMoE", {"numa": 2}, "FusedMoE has no numa. It has backend, data_type, n_def"),
    ("linear.MarlinLinear", {"generate_op": "KLinearQ2"}, "no generate_op 'KLinearQ2'. Use KLin"),
    ("linear.MarlinLinear", {"generate_device": "npu"}, "Write cpu, cuda, or cuda:0"),
    ("attention.FlashInferMLA", {"generate_device": "cpu", "prefill_device": "cuda"}, "name one"),
    ("attention.Unheard", {}, "there is no operator 'operators.attention.Unheard'. Of KTrans"),
    ("models.KModel", {"per_layer_prefill_intput_threshold": 9}, "give --prefill stream"),
    ("models.KModel", {"transfer_map": {"one": "cuda:1"}}, "Write numbers of layers and their dev"),
    ("models.KModel", {"transfer_map": {1: "npu"}}, "no transfer_map 'npu'. Write cpu, cuda"),
    ("attention.KDeepseekV2Attention", {"absorb_for_prefill": True}, "Write false: keys and val"),
    ("linear.MarlinLinear", {"prefill_op": "KLinearQ8"}, "no prefill_op 'KLinearQ8'. Use KLinearT"),
    ("linear.MarlinLinear", {"data_type": "Int4", "num_bits": 8}, "to be int4 and int8. Drop one"),
    ("linear.MarlinLinear", {"generate_op": "KLinearFP8", "num_bits": 4}, "to be fp8 and int4"),
    (
        "linear.MarlinLinear",
        {"generate_op": "KLinearCPUInfer", "generate_device": "cuda"},
        "It is for the CPU, and the linear on cuda:0",
    ),
    ("experts.FusedMoE", {"prefill_device": "cuda:1", "out_device": "cuda"}, "Write cuda:0"),
    ("RoPE.RotaryEmbedding", {"generate_device": "cpu", "prefill_device": "cuda"}, "name one"),
    ("gate.KMoEGate", {"topk": 2}, "KMoEGate has no topk. It has generate_device, prefill_dev"),
    ("gate.Unheard", {}, "there is no operator 'operators.gate.Unheard'"),
]


@pytest.mark.parametrize(("cls", "kwargs", "message"), REFUSED)
def test_what_has_no_counterpart_is_named(cls: str, kwargs: Any, message: str) -> None:
    replace = {"class": f"operators.{cls}", "kwargs": kwargs}
    with pytest.raises(PykernelsError) as raised:
        resolve_rules([MOE | {"replace": replace}], "deepseek_v3")
    assert message in str(raised.value)


def as_its_files_say(operator: str, kwargs: Any) -> list[dict[str, Any]]:
    name = shipped.NAMES.get(operator.partition(".")[0], r"\.self_attn$")
    path = operator if operator == "default" else f"ktransformers.operators.{operator}"
    return [{"match": {"name": name}, "replace": {"class": path, "kwargs": kwargs}}]


@pytest.mark.parametrize(("operator", "kwargs", "becomes"), shipped.ACCEPTED)
def test_operators_of_its_files_become(operator: str, kwargs: Any, becomes: str) -> None:
    said = []
    for rule in resolve_rules(as_its_files_say(operator, kwargs), "deepseek_v3"):
        what = rule.match.part if rule.check else rule.replace.kwargs.get("format", "placed")
        said.append(f"{what} on {rule.replace.device}")
    assert ", ".join(said) == becomes


@pytest.mark.parametrize(("operator", "kwargs", "message"), shipped.REFUSED)
def test_operators_of_its_files_are_refused(operator: str, kwargs: Any, message: str) -> None:
    with pytest.raises(PykernelsError) as raised:
        resolve_rules(as_its_files_say(operator, kwargs), "deepseek_v3")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("operator", "kwargs", "part"),
    [
        ("RoPE.RotaryEmbedding", shipped.at("cuda:1"), "self_attn.rotary_emb"),
        ("gate.KMoEGate", shipped.at("cuda:1"), "mlp.gate"),
        ("layernorm.RMSNorm", shipped.at("cuda:1"), "norm"),
        ("experts.KDeepseekV3MoE", shipped.at("cuda:1"), "mlp"),
        ("experts.KTransformersExperts", shipped.experts("cuda:1"), "mlp.experts"),
        ("mlp.kDeepseekV3MLP", shipped.at("cuda:1"), "mlp"),
        ("models.KLlamaModel", shipped.at("cuda:1"), "model"),
        ("models.KDeepseekV2Model", {"transfer_map": {1: "cuda:1"}}, "layers.1.self_attn"),
    ],
)
def test_a_place_that_only_the_layer_has_is_checked(operator: str, kwargs: Any, part: str) -> None:
    """The same rule, its layer on one GPU, then on the other."""
    [rule] = as_its_files_say(operator, kwargs)
    if not operator.startswith("experts.KT"):
        del rule["match"]["name"]
        rule["match"]["class"] = "ktransformers.models.modeling.OfItsOwn"
    everything = {"match": {"name": "^$"}, "replace": {"device": "cuda:1"}}
    lm = meta(**SIZES)
    for rules in ([rule], [rule, everything]):
        found = resolve_rules(rules, "deepseek_v3")
        if len(rules) == 2:
            followed(lm, found, "cuda:0,cuda:1")
            continue
        inject(lm, found)
        with pytest.raises(
            PykernelsError, match=rf"wants \S*{part} on cuda:1, .* on cuda:0\. Name"
        ):
            followed(lm, found, "cuda:0,cuda:1")


def test_a_check_that_matches_nothing_is_an_error() -> None:
    [rule] = as_its_files_say("gate.KMoEGate", shipped.at("cuda"))
    rules = resolve_rules([rule], "llama")
    with pytest.raises(PykernelsError, match="part 'router'.* matches no module"):
        followed(meta("llama"), rules, "cuda:0")


def test_flashinfers_mla_is_for_mla_alone() -> None:
    rules = resolve_rules(parse_rules(yaml.safe_load(LISTING), "listing")[1:2], "mixtral")
    with pytest.raises(PykernelsError, match="holds 'mla'.* matches no module"):
        place(meta("mixtral"), rules)
