"""On which device rules place modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import model
from model.modules.inject import inject
from model.modules.placement import ModulePlacement, place
from model.rules import parse_rules, resolve_rules
from pykernels.errors import PykernelsError

from ..checks import Checkpoints, refused
from .test_inject import meta


def placed(*rules: Any, **config: Any) -> ModulePlacement:
    return place(meta(**config), parse_rules(list(rules), "test.yaml"))


def at(device: Any, name: str) -> dict[str, Any]:
    return {"match": {"name": name}, "replace": {"device": device}}


def test_shipped_sets_split_layers_and_leave_experts_to_the_cpu() -> None:
    lm = meta(num_hidden_layers=4)
    rules = resolve_rules("embedding-on-cpu,2-gpus,int4", "deepseek_v3")
    inject(lm, rules)
    where = place(lm, rules)
    assert where.of("model.embed_tokens.weight") == "cpu"
    layers = [where.of(f"model.layers.{i}.self_attn.o_proj.weight") for i in range(4)]
    assert layers == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert where.of("model.layers.3.mlp.gate.weight") == "cuda:1"
    assert where.devices == ["cpu", "cuda:0", "cuda:1"]


def test_the_first_rule_that_places_a_module_wins() -> None:
    where = placed(at("cuda:1", r"layers\.1\.mlp$"), at("cuda:0", r"^model\.layers\.\d+$"))
    assert where.of("model.layers.1.mlp.gate.weight") == "cuda:1"
    assert where.of("model.layers.1.self_attn") == "cuda:0"
    assert where.of("model.norm") == "cpu"


WRONG = [
    ([at("cpu", "layer_norms")], "rule 1 .* matches no module. Modules are called like model"),
    ([at("cuda:0", "^model$"), at("cuda:1", "^model$")], "rule 2 .* is never reached"),
]


@pytest.mark.parametrize(("rules", "message"), WRONG)
def test_a_rule_that_places_nothing_says_so(rules: list[Any], message: str) -> None:
    with pytest.raises(PykernelsError, match=message):
        placed(*rules)


def test_tied_tensors_stay_together() -> None:
    with pytest.raises(PykernelsError, match=r"lm_head.weight on cuda:0 and .* are one tensor"):
        placed(at("cuda:0", "lm_head"), tie_word_embeddings=True)


def test_gpus_are_the_engines(checkpoint: Checkpoints) -> None:
    path = checkpoint("deepseek_v3").path
    refused("forward with our kernels runs on the CPU, not on cuda:0", path, rules="gpu")
    refused("not on cuda:0. Use load_engine", path, device="cuda:0")
    if not torch.cuda.is_available():
        with pytest.raises(PykernelsError, match="no cuda:0: torch finds no CUDA GPU"):
            model.load_engine(path, rules="gpu")


def test_rules_of_the_command_line(run: Any, writer: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("- match: {klass: A}\n  replace: {class: B}\n")
    result = run("generate", "a", "--model", writer, "--rules", file)
    assert (result.code, result.out) == (2, "")
    assert "mine.yaml:1: unknown key 'klass' in match. Did you mean class?" in result.err


def test_int4_linears_in_the_engine_and_eagerly(checkpoint: Checkpoints) -> None:
    """Both multiply with the same packed matrices; the text differs from that of the originals."""
    path = checkpoint("qwen2_moe").path
    prompt = list(range(5, 40))
    lm = model.from_pretrained(path, rules="int4")
    assert lm.model.layers[0].self_attn.q_proj.weight is None
    with torch.no_grad():
        eager = lm(torch.tensor([prompt])).logits[0, -1].float()
    with model.load_engine(path, rules="int4", max_model_len=64) as llm:
        result = llm.generate(prompt, temperature=0, max_tokens=1, logprobs=5)
        linear = llm.runner.model.layers[0].attention.qkv
    assert linear.parts[0].fmt == "int4"
    top = eager.log_softmax(-1).topk(5).values
    assert abs(float(result.completions[0].logprobs[0].logprob) - float(top[0])) < 0.1
