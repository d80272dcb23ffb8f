"""Hugging Face's own door: ``from_pretrained(path, quantization_config=PykernelsConfig())``.

    from transformers import AutoModelForCausalLM, pipeline
    from model import PykernelsConfig

    lm = AutoModelForCausalLM.from_pretrained(path, quantization_config=PykernelsConfig())
    pipeline("text-generation", lm, tokenizer=tokenizer)

The import registers the quantizer. transformers builds the model on the meta device and would then
read the whole checkpoint in its own way, so it is handed a model without modules; behind that the
modules come back and are filled by what ``model.from_pretrained`` fills them by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from pykernels.errors import PykernelsError

from .checkpoint.config import read_config
from .pretrained import fill
from .rules import Rules, resolve_rules

METHOD = "pykernels"


@register_quantization_config(METHOD)
class PykernelsConfig(QuantizationConfigMixin):
    """How a checkpoint is loaded; the arguments of ``model.from_pretrained`` that are not
    transformers' own.

    Args:
        rules: a YAML file, a list of rules, or None for those shipped for the architecture.
        threads: workers of the experts; None: unchanged.
        kernel: auto, amx, avx512, avx2 or generic.
        numa: "auto", "off" or the number of NUMA nodes; None: unchanged.
    """

    def __init__(
        self,
        rules: Rules = None,
        threads: int | None = None,
        kernel: str = "auto",
        numa: str | int | None = None,
        quant_method: str = METHOD,
    ) -> None:
        self.rules = str(rules) if isinstance(rules, Path) else rules
        self.threads, self.kernel, self.numa = threads, kernel, numa
        self.quant_method = quant_method


@register_quantizer(METHOD)
class PykernelsQuantizer(HfQuantizer):
    """transformers' hooks around its loading."""

    def update_device_map(self, device_map: Any) -> Any:
        if device_map is not None:
            raise PykernelsError(
                f"device_map={device_map!r} beside PykernelsConfig",
                "Leave it out: it runs on the CPU, and load_engine on GPUs",
            )
        return None

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **given: Any
    ) -> PreTrainedModel:
        files = given.get("checkpoint_files")
        if not files:
            raise PykernelsError(
                "PykernelsConfig needs a checkpoint's files, not a state dict", "Give its folder"
            )
        self._folder, self._dtype = Path(files[0]).parent, model.dtype
        self._modules, self._tied = dict(model._modules), model.all_tied_weights_keys
        model._modules.clear()
        model.all_tied_weights_keys = {}
        model._keys_to_ignore_on_load_unexpected = {""}  # every key, to a model without modules
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        del model._keys_to_ignore_on_load_unexpected  # the class's own again
        model._modules.update(self._modules)
        model.all_tied_weights_keys = self._tied
        config = self.quantization_config
        # Checks what transformers accepts, but no forward of its models runs with.
        rules = resolve_rules(config.rules, read_config(self._folder).model_type)
        fill(
            model,
            self._folder,
            rules,
            config.kernel,
            self._dtype,
            threads=config.threads,
            numa=config.numa,
        )
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Packed experts are in no state dict."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False


_merge = AutoHfQuantizer.merge_quantization_configs


def _ours_or_merged(stored: Any, given: Any) -> Any:
    """transformers refuses a config of another class than the checkpoint's own (DeepSeek's FP8)."""
    return given if isinstance(given, PykernelsConfig) else _merge(stored, given)


AutoHfQuantizer.merge_quantization_configs = staticmethod(_ours_or_merged)

__all__ = ["PykernelsConfig", "PykernelsQuantizer"]
