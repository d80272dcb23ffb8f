"""A dense llama in a GGUF file as a Mixtral: the same model as long as its experts are copies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import model
from model.upcycling.experts import Recipe
from model.upcycling.make import make
from pykernels.errors import PykernelsError

from . import tiny
from .checks import errors, logits
from .conftest import Run, failed

CONFIG = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(path: Path) -> PreTrainedModel:
    """The file, as llama.cpp writes it, and transformers' model of the same weights."""
    lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**CONFIG), dtype=torch.float32)
    tiny.randomize(lm, 0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(lm.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    letters = [*map(chr, [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)])]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "<s>", "</s>", "th"])
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, tensor in lm.state_dict().items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = NAMES[rest.removesuffix(".weight")]
            if part in ("attn_q", "attn_k"):  # convert_hf_to_gguf.py's permute
                heads = 4 if part == "attn_q" else 2
                tensor = tensor.view(heads, 2, 8, 64).swapaxes(1, 2).reshape(tensor.shape)
            writer.add_tensor(f"blk.{layer}.{part}.weight", tensor.contiguous().numpy())
        elif name != "lm_head.weight":
            stem = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
            writer.add_tensor(f"{stem[name]}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return lm.eval()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write(path)


def test_copies_are_the_model_that_they_are_of(
    source: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    path, dense = source
    figures = make(path, tmp_path / "copies", Recipe(noise=0))
    assert figures.perplexity == pytest.approx(figures.dense_perplexity, rel=0.01)
    lm = model.from_pretrained(tmp_path / "copies", rules=[], dtype="float32")
    assert lm.config.model_type == "mixtral"
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    assert errors(logits(lm, ids), logits(dense, ids)).max() < 0.03
    assert make(Path("gone"), tmp_path / "copies", Recipe(noise=0)) == figures, "made once"
    gates = [p for name, p in lm.named_parameters() if "mlp.gate.weight" in name]
    assert not torch.equal(*gates), "each layer has a router of its own"
    text = "the weather, don't mind"
    tokenizer = model.load_tokenizer(tmp_path / "copies")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("th")["input_ids"] == [258]


def test_noise_tells_experts_apart(
    source: tuple[Path, PreTrainedModel], run: Run, tmp_path: Path
) -> None:
    path, _ = source
    to = tmp_path / "apart"
    result = run("upcycle", path, "--out", to, "--noise", "0.2", "--experts", "3", "--topk", "1")
    assert result.out == f"{to}\n" and "perplexity" in result.err
    lm = model.from_pretrained(to, rules=[])
    experts = lm.model.layers[0].mlp.experts.down_proj
    assert experts.shape[0] == 3 and lm.config.num_experts_per_tok == 1
    difference = (experts[0] - experts[1]).float().std() / experts.float().std()
    assert 0.2 < float(difference) < 0.35


def test_what_cannot_be_upcycled_is_refused(
    source: tuple[Path, PreTrainedModel], run: Run, tmp_path: Path
) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"junk" * 10)
    wrong = dataclasses.replace(Recipe(), topk=5)
    with pytest.raises(PykernelsError, match="5 of 4 experts"):
        make(source[0], tmp_path / "out", wrong)
    failed(run("upcycle", junk, "--out", tmp_path / "out"), "junk.gguf")
    assert not list(tmp_path.glob("out*"))
