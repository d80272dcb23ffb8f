"""Stored tensors that are not loaded: which they are, and what a user is told of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedModel

from .quantized import compressed_tensors
from .tensors.matrix import Lookup
from .tensors.safetensors import TensorSlice

_MATRIX = {".bias": ".qweight", ".weight_zero_point": ".weight_scale"}
"""Companions that some writers add to a quantized matrix though they are zeros, and the tensor by
which such a matrix is known."""

_PREDICTION = (
    "the checkpoint's layers for multi-token prediction are left out: nothing is drafted with them"
)
_ENCODERS = (
    "the checkpoint's encoders of images and sounds are left out: the model reads text alone"
)
_LEFT_OUT = {
    **compressed_tensors.IGNORED,
    r"^(model\.)?mtp\.": _PREDICTION,
    r"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.": _ENCODERS,
    r"^(model\.)?visual\.": "the checkpoint's vision tower is left out: the model reads text alone",
}
"""Tensors that a user would miss, and the note that says so."""


class Unneeded:
    """Stored names that no module takes and none misses: the model's own list, old rotary buffers,
    layers for multi-token prediction, and scales of what is not quantized here."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        patterns = list(model._keys_to_ignore_on_load_unexpected or ())
        layers = config.num_hidden_layers
        extra = getattr(config, "num_nextn_predict_layers", None) or 0
        self._notes = dict(_LEFT_OUT)
        self._notes |= {rf"^model\.layers\.{layers + i}\.": _PREDICTION for i in range(extra)}
        patterns += [r"rotary_emb\.inv_freq$", *self._notes]
        self._pattern = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))

    def __call__(self, names: Lookup, key: str) -> bool:
        """Whether the stored tensor `key` is one of them."""
        return bool(self._pattern.search(key)) or _of_zeros(names, key)

    def notes_of(self, keys: Iterable[str]) -> list[str]:
        """A line for each kind of those stored names that a user would miss."""
        unneeded = list(keys)
        return list(
            dict.fromkeys(
                note
                for pattern, note in self._notes.items()
                if any(re.search(pattern, key) for key in unneeded)
            )
        )


def _of_zeros(names: Lookup, key: str) -> bool:
    """Whether it is such a companion, of zeros: of GPTQ's biases, of symmetric integers."""
    for suffix, matrix in _MATRIX.items():
        base = key.removesuffix(suffix)
        if base != key and f"{base}{matrix}" in names.stored:
            return not names.checkpoint.read(TensorSlice(names.stored[key])).any()
    return False
