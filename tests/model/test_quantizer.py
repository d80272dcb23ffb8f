"""transformers' own `from_pretrained`, `pipeline` and `generate` over our loading."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    TextIteratorStreamer,
    pipeline,
)

import model
from model import PykernelsConfig
from pykernels.errors import PykernelsError

from .checks import Own, change_tensors, drop, moe_blocks, put

PROMPT = "def mean(xs):\n    return"
TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}def "


@pytest.fixture(scope="module")
def lm() -> PreTrainedModel:
    config = PykernelsConfig(kernel="auto")
    return AutoModelForCausalLM.from_pretrained(model.EMBEDDED, quantization_config=config)


def test_it_is_what_our_own_door_gives(lm: PreTrainedModel) -> None:
    ours = model.from_pretrained(model.EMBEDDED)
    assert type(lm) is type(ours) and moe_blocks(lm).keys() == moe_blocks(ours).keys()
    assert lm.generation_config.eos_token_id == ours.generation_config.eos_token_id
    ids = model.load_tokenizer(model.EMBEDDED)(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, ours(ids).logits)
    assert not any(tensor.is_meta for tensor in (*lm.parameters(), *lm.buffers()))


def test_what_transformers_does_with_models_works(lm: PreTrainedModel) -> None:
    tokenizer = model.load_tokenizer(model.EMBEDDED)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    greedy = lm.generate(**inputs, max_new_tokens=8, do_sample=False)
    beams = lm.generate(**inputs, max_new_tokens=8, num_beams=3, do_sample=False)
    torch.manual_seed(0)
    drawn = lm.generate(**inputs, max_new_tokens=8, do_sample=True, num_return_sequences=2)
    assert beams.shape == greedy.shape == (1, length + 8) and drawn.shape[0] == 2
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    how = {**inputs, "max_new_tokens": 8, "do_sample": False, "streamer": streamer}
    thread = Thread(target=lm.generate, kwargs=how)
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    assert streamed == tokenizer.decode(greedy[0, length:])
    tokenizer.chat_template = TEMPLATE
    pipe = pipeline("text-generation", lm, tokenizer=tokenizer, device="cpu")
    chat = [{"role": "user", "content": "sorts a list"}]
    answer = pipe(chat, max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert answer[0] == chat[0] and answer[1]["role"] == "assistant" and answer[1]["content"]


def test_what_is_missing_or_not_ours_is_refused(
    own: Own, lm: PreTrainedModel, tmp_path: Path
) -> None:
    def load(folder: Path) -> PreTrainedModel:
        config = PykernelsConfig()
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    folder = own("qwen3_moe", shards=1)
    name = "model.layers.1.self_attn.o_proj.weight"
    change_tensors(folder, drop(name))
    with pytest.raises(PykernelsError, match="o_proj"):
        load(folder)
    change_tensors(folder, put(name, torch.zeros(64, 64)))
    change_tensors(folder, put("model.layers.1.sorcery", torch.zeros(1)))
    with pytest.raises(PykernelsError, match="sorcery"):
        load(folder)
    with pytest.raises(Exception, match="pykernels"):
        lm.save_pretrained(tmp_path)
