"""Keys of the metadata: read, without effect, or refused by name. What they mean is llama.cpp's:
src/llama-model.cpp and src/models/."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf.constants import Keys
from transformers import CONFIG_MAPPING

from model.checkpoint.gguf import hyperparameters
from model.checkpoint.gguf.config import config_of
from model.checkpoint.gguf.families import FAMILIES
from model.checkpoint.gguf.hyperparameters import COMMON, OWN, READ
from model.checkpoint.gguf.metadata import Metadata
from pykernels.errors import PykernelsError

VALUES: dict[str, Any] = {
    "block_count": 4,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.key_length": 16,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 48,
    "attention.sliding_window": 8,
    "shortconv.l_cache": 3,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}


class Recorded(Metadata):
    """Remembers the keys that were asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def has(self, key: str) -> bool:
        self.asked.add(key)
        return super().has(key)

    def _get(self, key: str, default: Any) -> Any:
        self.asked.add(key)
        return super()._get(key, default)


def of(arch: str, vocabulary: int = 96, tensors: Any = (), **changes: Any) -> Any:
    """A file with VALUES and `changes`, dots of keys written as two underlines."""
    plain = {**VALUES, "attention.sliding_window": 0} if arch == "lfm2" else VALUES
    values = {**plain, **{key.replace("__", "."): value for key, value in changes.items()}}
    if arch == "deepseek2":
        values = {"attention.value_length": 16, **values, "attention.key_length": 24}
    if arch == "gemma4":
        values = {"attention.sliding_window_pattern": [True, True, True, False], **values}
    stored = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    infos = {"token_embd.weight": SimpleNamespace(shape=(vocabulary, 64))}
    infos |= {name: SimpleNamespace(shape=(64, 64)) for name in tensors}
    path = Path("m.gguf")
    return SimpleNamespace(
        metadata=stored,
        architecture=arch,
        path=path,
        tensors=infos,
        names={name: name for name in infos},
        hyperparameters=Recorded(stored, arch, path),
    )


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_table_says_what_is_read(arch: str) -> None:
    read = {key for key, kind in {**COMMON, **OWN[arch]}.items() if kind == READ}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    plain, scaled = of(arch), of(arch, **yarn)
    for file in (plain, scaled):
        if arch == "gemma4" and file is scaled:
            with pytest.raises(PykernelsError, match="rope.scaling.type 'yarn', only none"):
                config_of(file)
            continue
        CONFIG_MAPPING[config_of(file)["model_type"]].from_dict(config_of(file))
    asked = plain.hyperparameters.asked | scaled.hyperparameters.asked
    optional = {"rope.scaling.yarn_log_multiplier"}  # DeepSeek's, 0 elsewhere
    assert asked - optional == read - optional
    assert OWN.keys() == FAMILIES.keys()


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention.head_count": [4, 4, 2, 4]}),
    ("llama", {"attention.head_count_kv": [2, 2, 1, 2]}),
    ("llama", {"feed_forward_length": [96, 96, 64, 96]}),
    ("qwen3moe", {"expert_used_count": [2, 2, 2, 1]}),
    ("gpt-oss", {"attention.sliding_window": [8, 0, 8, 0]}),
    ("llama", {"attention.causal": False}),
    ("llama", {"rope.scaling.type": "longrope"}),
    ("llama", {"rope.scaling.attn_factor": 1.2}),
    ("qwen3moe", {"rope.dimension_count": 8}),
    ("qwen3moe", {"attention.value_length": 8}),
    ("qwen3moe", {"expert_group_count": 4}),
    ("qwen3moe", {"expert_gating_func": 2}),
    ("qwen3moe", {"expert_weights_norm": False}),
    ("glm4moe", {"expert_gating_func": 1}),
    ("deepseek2", {"expert_gating_func": 3}),
    ("deepseek2", {"expert_weights_norm": True}),  # beside a softmax
    ("deepseek2", {"attention.temperature_scale": 0.1}),
    ("dots1", {"swiglu_clamp_exp": [0.0, 7.0]}),
    ("llama", {"logit_scale": 0.25}),
    ("llama", {"attention.scale": 0.1}),
    ("gpt-oss", {"rope.freq_base_swa": 5000.0}),
    ("gemma4", {"embedding_length_per_layer_input": 256}),
    ("gemma4", {"attention.shared_kv_layers": 2}),
    ("gemma4", {"attention.value_length_swa": 8}),
    ("gemma4", {"attention.head_count_kv": [2, 1, 2, 1]}),
    ("lfm2moe", {"attention.head_count_kv": [0, 2, 0, 4]}),
    ("lfm2moe", {"expert_gating_func": 1}),
    ("lfm2", {"attention.sliding_window": 8}),
    ("qwen3next", {"ssm.inner_size": 128}),  # values of another size than keys
    ("qwen35moe", {"rope.scaling.type": "longrope"}),
]


def test_frequency_factors_of_another_size_are_refused() -> None:
    file = of("llama")
    file.tensors["rope_freqs.weight"] = SimpleNamespace(dtype="F32", shape=(5,))
    file.names["rope_freqs.weight"] = "inv_freq"
    file.mismatch = "hint"
    with pytest.raises(PykernelsError, match=r"rope_freqs.weight in F32 \[5\], .* F32 \[8\]"):
        config_of(file)


@pytest.mark.parametrize(("arch", "values"), REFUSED)
def test_what_changes_the_forward_is_refused_by_name(arch: str, values: dict[str, Any]) -> None:
    (key,) = values
    with pytest.raises(PykernelsError, match=rf"{arch}\.{key} .* supported"):
        config_of(of(arch, **values))


def test_short_convolutions_lie_where_keys_have_no_heads() -> None:
    config = config_of(of("lfm2moe", attention__head_count_kv=[0, 2, 0, 2]))
    assert config["layer_types"] == ["conv", "full_attention"] * 2
    assert (config["num_key_value_heads"], config["conv_L_cache"]) == (2, 3)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("shortconv__l_cache", None, "has no lfm2moe.shortconv.l_cache in its metadata"),
        ("shortconv__l_cache", 1, "lfm2moe.shortconv.l_cache '1', which cannot be"),
        ("attention__head_count_kv", [0, 2], r"head_count_kv '\[0, 2\]', which cannot be"),
    ],
)
def test_short_convolutions_of_no_size_are_refused(key: str, value: Any, told: str) -> None:
    with pytest.raises(PykernelsError, match=told):
        config_of(of("lfm2moe", **{key: value}))


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention.causal": True, "logit_scale": 1.0, "rope.scaling.attn_factor": 1.0}),
    ("llama", {"rope.scaling.finetuned": True, "expert_weights_scale": 0.0}),
    ("deepseek2", {"attention.temperature_scale": 0.0, "swiglu_clamp_exp": [0.0, 0.0]}),
    ("qwen3moe", {"expert_group_count": 1, "expert_group_used_count": 1, "attention.unheard": 3}),
    ("olmoe", {"attention.clamp_kqv": 0.0, "expert_weights_norm": False}),
]


@pytest.mark.parametrize(("arch", "values"), NEUTRAL)
def test_neutral_values_change_nothing(arch: str, values: dict[str, Any]) -> None:
    assert config_of(of(arch, **values)) == config_of(of(arch))


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({"block_count": 47, "vocabulary": 154880}, "deepseek_v3"),  # GLM-4.7-Flash's first files
        ({"block_count": 48, "nextn_predict_layers": 1, "vocabulary": 154880}, "deepseek_v3"),
        ({"block_count": 47, "vocabulary": 154880, "expert_gating_func": 1}, "deepseek_v2"),
        ({"block_count": 47, "vocabulary": 102400}, "deepseek_v2"),
        ({"expert_gating_func": 0}, "deepseek_v2"),
        ({"expert_gating_func": 2}, "deepseek_v3"),
    ],
)
def test_how_deepseek2_scores(changes: dict[str, Any], model_type: str) -> None:
    norm = {"expert_weights_norm": model_type == "deepseek_v3"}
    assert config_of(of("deepseek2", **changes, **norm))["model_type"] == model_type


def test_deepseek2_without_a_latent_of_the_queries() -> None:
    """llama.cpp goes by the size of the model, or by the tensor: the key may be there."""
    assert config_of(of("deepseek2"))["q_lora_rank"] == 48
    assert config_of(of("deepseek2", tensors=["blk.0.attn_q.weight"]))["q_lora_rank"] is None


def test_layers_with_a_window_in_gpt_oss() -> None:
    """set_swa_pattern: of n layers the last has none; 0: all have one."""

    def windows(**values: Any) -> list[bool]:
        types = config_of(of("gpt-oss", **values))["layer_types"]
        return [one == "sliding_attention" for one in types]

    assert windows() == [True, False, True, False]
    assert windows(attention__sliding_window_pattern=3) == [True, True, False, True]
    assert windows(attention__sliding_window_pattern=1) == [False] * 4
    assert windows(attention__sliding_window_pattern=0) == [True] * 4


def test_which_layers_of_qwen3next_are_delta_nets() -> None:
    """Every fourth attends unless the file says otherwise; the last one is the prediction layer's,
    which is left out."""

    def nets(**values: Any) -> list[bool]:
        types = config_of(of("qwen3next", **values))["layer_types"]
        return [one == "linear_attention" for one in types]

    assert nets() == [True, True, True, False]
    assert nets(full_attention_interval=2) == [True, False, True, False]
    own = [False, True, True, False]
    assert nets(attention__recurrent_layers=own, nextn_predict_layers=1) == own[:3]


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        *((f"ssm.{key}", None, "no") for key in ("state_size", "conv_kernel", "inner_size")),
        ("rope.dimension_count", None, "no"),
        ("ssm.conv_kernel", 1, "the"),
        ("ssm.group_count", 3, "the"),  # four value heads on three key heads
        ("attention.recurrent_layers", [True, False], "the"),  # of four layers
        ("attention.recurrent_layers", 2, "the"),
    ],
)
def test_delta_nets_without_their_sizes(key: str, value: Any, cause: str) -> None:
    with pytest.raises(PykernelsError, match=rf"^m.gguf has {cause} qwen35moe\.{key}"):
        config_of(of("qwen35moe", **{key: value}))


def test_no_rope_scaling_where_transformers_has_one_by_default() -> None:
    config = CONFIG_MAPPING["gpt_oss"].from_dict(config_of(of("gpt-oss")))
    assert config.rope_parameters["rope_type"] == "default"


def test_no_clamp_is_none_to_transformers() -> None:
    """transformers clamps to [-0, 0] otherwise, llama.cpp's f_clamp_kqv 0 is none."""
    assert config_of(of("olmoe", attention__clamp_kqv=0.0))["clip_qkv"] is None


def test_every_key_is_spelt_as_the_package_spells_it() -> None:
    groups = [group for group in vars(Keys).values() if inspect.isclass(group)]
    known = {value for group in groups for value in vars(group).values()}
    others = {"rope.scale_linear", "attention.value_scale", "attention.recurrent_layers"}
    tables = (COMMON, hyperparameters.ELSEWHERE, *OWN.values())
    ours = {key for table in tables for key in table} - others  # LLM_KV_NAMES of llama.cpp has them
    assert {f"{{arch}}.{key}" for key in ours} <= known
