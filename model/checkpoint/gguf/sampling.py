"""How a GGUF file's model wants to be sampled from, in the words of a generation_config.json."""

from __future__ import annotations

from typing import Any

from pykernels.errors import PykernelsError

from .files import GGUF
from .tokenizer import special_ids

_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "mirostat": "mirostat",
    "xtc_probability": "xtc_probability",
}
"""Settings by the keys of ``general.sampling``; transformers has no names for the last two."""
_SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def sampling_of(checkpoint: GGUF) -> dict[str, Any] | None:
    """Fields of a `GenerationConfig`; None if the metadata says nothing of sampling.

    llama.cpp's penalty is of the last 64 tokens, or of ``penalty_last_n``; only one of all (-1) is
    transformers' ``repetition_penalty``, any other keeps llama.cpp's name.

    Raises:
        PykernelsError: a value of another kind.
    """
    metadata, fields = checkpoint.metadata, {}
    for key, name in _NAMES.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            if type(value) not in (int, float):
                raise _wrong(checkpoint, f"general.sampling.{key}", value)
            fields[name] = value
    if "repetition_penalty" in fields and metadata.get("general.sampling.penalty_last_n") != -1:
        fields["penalty_repeat"] = fields.pop("repetition_penalty")
    suppressed = metadata.get(_SUPPRESSED)
    if suppressed:
        if not isinstance(suppressed, list) or any(type(token) is not int for token in suppressed):
            raise _wrong(checkpoint, _SUPPRESSED, suppressed)
        fields["suppress_tokens"] = suppressed
    if not fields:
        return None
    if "temperature" in fields:
        fields["do_sample"] = fields["temperature"] > 0
        if not fields["do_sample"]:
            del fields["temperature"]  # 0 is greedy in llama.cpp, an error in transformers
    return {**special_ids(checkpoint), **fields}


def _wrong(checkpoint: GGUF, key: str, value: Any) -> PykernelsError:
    return PykernelsError(
        f"{checkpoint.path} has the {key} {str(value)[:60]!r}, which cannot be",
        "Convert the model again",
    )
