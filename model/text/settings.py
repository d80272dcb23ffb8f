"""A checkpoint's generation_config.json as settings of the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from pykernels.errors import PykernelsError
from runtime.engine import SamplingParams

_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_SAME_NAME = ("repetition_penalty",)
_OTHER_NAME = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "max_time": "deadline",
}

_NOT_DONE: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "penalty_alpha": 0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "diversity_penalty": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "token_healing": False,
    "remove_invalid_values": False,
    # of llama.cpp, in GGUF files
    "penalty_repeat": 1,
    "mirostat": 0,
}
"""Settings that the engine does not have, and values that change nothing."""
_NOT_DONE_WHEN_SAMPLING = {
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "xtc_probability": 0,
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a generation config asks of the engine.

    Attributes:
        fields: of ``SamplingParams``.
        max_length, min_length: tokens of prompt and output; None: not said, or ``fields`` has the
            number of new tokens.
        not_done: settings that the engine does not have, with their values.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    min_length: int | None = None
    not_done: dict[str, Any] = field(default_factory=dict)

    def params(self, prompt_size: int, limit: int | None = None, **given: Any) -> SamplingParams:
        """The parameters of a request: those that are given, else the config's.

        Args:
            prompt_size: tokens of the prompt.
            limit: most tokens of prompt and output; the config's number of new tokens ends there.
            given: fields of ``SamplingParams``; a ``logit_bias`` is added to the config's.

        Raises:
            PykernelsError: a field out of range.
        """
        fields = dict(self.fields)
        if self.max_length is not None:
            fields["max_tokens"] = max(1, self.max_length - prompt_size)
        if limit is not None and "max_tokens" in fields:
            fields["max_tokens"] = max(1, min(fields["max_tokens"], limit - prompt_size))
        if self.min_length is not None and self.min_length > prompt_size:
            fields["min_tokens"] = self.min_length - prompt_size
        if "logit_bias" in fields and isinstance(given.get("logit_bias"), Mapping):
            given = {**given, "logit_bias": {**fields["logit_bias"], **given["logit_bias"]}}
        fields |= given
        most = fields.get("max_tokens")
        if "min_tokens" not in given and isinstance(most, int):
            least = fields.get("min_tokens", 0)  # transformers ends at max_new_tokens too
            fields["min_tokens"] = min(least, most) if isinstance(least, int) else least
        return SamplingParams(**fields)

    def left_out(self, params: SamplingParams) -> dict[str, Any]:
        """What ``params``, which are taken as they are, leave at ``SamplingParams``' default."""
        plain = SamplingParams()
        return {
            name: value
            for name, value in self.fields.items()
            if getattr(params, name) == getattr(plain, name) != getattr(self.params(0), name)
            and not (params.temperature == 0 and name in _WHEN_SAMPLING)
        }


def engine_settings(
    config: GenerationConfig | None, ends: Sequence[int], vocab_size: int, text: bool
) -> EngineSettings:
    """The settings of a generation config; what it leaves open is ``SamplingParams``' default.

    ``do_sample: false`` is temperature 0. Tokens outside the vocabulary are left out: they are
    never drawn.

    Args:
        ends: tokens that end an output.
        text: whether the engine makes text, in which stop strings can be looked for.

    Raises:
        PykernelsError: a value out of range.
    """
    if config is None:
        return EngineSettings()
    try:
        settings = _settings_of(config, ends, vocab_size, text)
        settings.params(0)
    except PykernelsError as error:
        raise PykernelsError(
            f"the generation config has {error.cause}", "Correct generation_config.json"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:  # a number where a list should be
        raise PykernelsError(
            f"the generation config cannot be read: {error}", "Correct generation_config.json"
        ) from error
    return settings


def _settings_of(
    config: GenerationConfig, ends: Sequence[int], vocab_size: int, text: bool
) -> EngineSettings:
    values = {name: value for name, value in vars(config).items() if value is not None}
    _check_kinds(values)
    fields = {name: values[name] for name in _SAME_NAME if name in values}
    fields |= {ours: values[name] for name, ours in _OTHER_NAME.items() if name in values}
    not_done = _changed(values, _NOT_DONE)
    if values.get("do_sample") is False:
        fields["temperature"] = 0
    else:
        fields |= {name: values[name] for name in _WHEN_SAMPLING if name in values}
        not_done |= _changed(values, _NOT_DONE_WHEN_SAMPLING)
    if "stop_strings" in values:
        (fields if text else not_done)["stop" if text else "stop_strings"] = values["stop_strings"]
    bias, longer = _biases(values, ends)
    if bias := {token: value for token, value in bias.items() if 0 <= token < vocab_size}:
        fields["logit_bias"] = bias
    return EngineSettings(
        fields,
        values.get("max_length") if "max_new_tokens" not in values else None,
        values.get("min_length") if "min_new_tokens" not in values else None,
        not_done | longer,
    )


def _check_kinds(values: dict[str, Any]) -> None:
    """Raises PykernelsError for what is used here and not as a field, which checks itself."""
    if not isinstance(values.get("do_sample", True), bool):
        raise _wrong("do_sample", values["do_sample"], "true or false")
    for name in ("max_length", "min_length"):
        value = values.get(name, 0)
        if type(value) is not int or value < 0:
            raise _wrong(name, value, "a number of tokens")


def _wrong(name: str, value: Any, wanted: str) -> PykernelsError:
    return PykernelsError(f"{name}={str(value)[:40]} cannot be used", f"Give {wanted}")


COMMAND_LINE = {"temperature": 0.8, "top_p": 0.95, "top_k": 0}
"""What ``generate`` and ``chat`` sample with where neither the user nor the checkpoint says."""


def with_defaults(options: dict[str, Any], config: GenerationConfig | None) -> dict[str, Any]:
    """Options of the command line; None becomes the checkpoint's, else ``COMMAND_LINE``'s."""
    own = {name: getattr(config, name, None) for name in COMMAND_LINE}
    if getattr(config, "do_sample", None) is False:
        own["temperature"] = 0.0
    defaults = {
        name: value if (value := own[name]) is not None else plain
        for name, plain in COMMAND_LINE.items()
    }
    return {name: defaults.get(name) if value is None else value for name, value in options.items()}


def note_of(not_done: dict[str, Any]) -> str:
    """One line that names settings which the engine does not have."""
    named = ", ".join(f"{name}={str(value)[:40]}" for name, value in not_done.items())
    return (
        f"the engine generates without {named} of the checkpoint's generation config; --eager, or"
        " from_pretrained, generates with transformers and its settings"
    )


def _changed(values: dict[str, Any], neutral: dict[str, Any]) -> dict[str, Any]:
    return {
        name: values[name]
        for name, nothing in neutral.items()
        if name in values and values[name] not in (nothing, [])
    }


def _biases(values: dict[str, Any], ends: Sequence[int]) -> tuple[dict[int, float], dict[str, Any]]:
    """Biases of single tokens, and the settings that name longer sequences."""
    bias: dict[int, float] = {}
    longer: dict[str, Any] = {}
    for sequence, value in _pairs(values.get("sequence_bias")):
        if len(sequence) == 1:
            bias[sequence[0]] = value
        else:
            longer["sequence_bias"] = values["sequence_bias"]
    banned: set[int] = set()
    for word in values.get("bad_words_ids") or ():
        if len(word) > 1:
            longer["bad_words_ids"] = values["bad_words_ids"]
        else:
            banned.update(token for token in word if token not in ends)  # as transformers has it
    banned.update(values.get("suppress_tokens") or ())
    return bias | dict.fromkeys(sorted(banned), -math.inf), longer


def _pairs(sequence_bias: Any) -> Iterable[tuple[Sequence[int], float]]:
    """A mapping of sequences to numbers, which JSON has as a list of pairs."""
    return sequence_bias.items() if isinstance(sequence_bias, dict) else sequence_bias or ()
