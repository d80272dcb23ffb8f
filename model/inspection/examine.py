"""A model by folder, configuration or name, as a list of entries with their totals."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from pykernels.errors import PykernelsError
from runtime.devices.gpus import gpus_of
from runtime.planning.placement import CPU

from ..architectures.decoder import cache_state_bytes, cache_token_bytes, cache_window
from ..architectures.families import why_not
from ..checkpoint.config import read_config, resolve_dtype
from ..checkpoint.gguf import find_gguf
from ..checkpoint.open import open_checkpoint
from ..checkpoint.packed.manifest import is_packed
from ..checkpoint.packed.mapped import PackedFolder
from ..checkpoint.plan import make_plan
from ..checkpoint.tensors.safetensors import INDEX
from ..modules.inject import inject
from ..named import ARCHS, RELEASED, make_config
from ..opened import engine_device, followed
from ..pinning.choose import Wanted, parse
from ..pretrained import build_meta
from ..rules import Rules, known_architectures, resolve_rules
from ..rules.schema import is_device
from .dealt import dealt
from .entries import Entry, entries
from .formats import Formats, cached, check_sizes, configured, planned
from .gpu_experts import GpuShare, gpu_bytes_for_experts, with_gpu_experts


@dataclass(frozen=True)
class Inspection:
    """What a model becomes.

    Attributes:
        source: what it was told from: "its headers", "its config.json alone", "its known shape".
        engine: whether the engine runs it; ``reason``: why not, if so.
        classes: class of every module, by its name.
        cache_bytes: bytes of one token's keys and values by ``kv_dtype`` ("fp8" in the engine
            alone); none if it is not known.
        state_bytes: bytes of state that the engine keeps of a sequence besides keys and values.
        window: keys that a token of layers with a window sees; 0: no layer has one.
        window_bytes: those of ``cache_bytes`` in bf16 that are of these layers.
        gpu_share: the experts that a GPU has besides all of them on the CPU; None if none was
            asked.
    """

    name: str
    model_type: str
    source: str
    engine: bool
    reason: str | None
    entries: list[Entry]
    classes: dict[str, str]
    cache_bytes: dict[str, int]
    gpu_share: GpuShare | None = None
    state_bytes: int = 0
    window: int = 0
    window_bytes: int = 0

    @property
    def devices(self) -> dict[str, tuple[int, int]]:
        """(parameters, bytes) on each device."""
        by_device: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for entry in self.entries:
            numbers, nbytes = by_device[entry.device]
            by_device[entry.device] = numbers + entry.parameters, nbytes + entry.bytes
        return dict(by_device)

    def parameters(self, routed: bool) -> int:
        """Parameters of the routed experts, or of everything else."""
        return sum(entry.parameters for entry in self.entries if entry.routed == routed)

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that a one-token step reads."""
        return sum(entry.token_bytes for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every module, none collapsed."""
        return {
            "model": self.name,
            "model_type": self.model_type,
            "source": self.source,
            "runs": "engine" if self.engine else "eager",
            "why_eager": self.reason,
            "modules": [entry.as_dict() for entry in self.entries],
            "devices": {
                device: {"parameters": numbers, "bytes": nbytes}
                for device, (numbers, nbytes) in self.devices.items()
            },
            "routed_parameters": self.parameters(True),
            "other_parameters": self.parameters(False),
            "token_bytes": self.token_bytes,
            "kv_cache_token_bytes": self.cache_bytes,
            "state_bytes": self.state_bytes,
            "window": self.window,
            "window_token_bytes": self.window_bytes,
            "gpu_experts": None if self.gpu_share is None else asdict(self.gpu_share),
        }


def examine(
    which: str | Path,
    rules: Rules = None,
    device: str = "cpu",
    eager: bool = False,
    experts: str = "cpu",
    slots: int = 0,
    gpu_experts: Wanted = None,
    gpu_gib: float | None = None,
) -> Inspection:
    """Reads headers (or only config.json, or a shape by its name) and applies the rules.

    Args:
        which: a checkpoint's folder, a config.json or its folder, or a name in ``ARCHS``.
        device: default device, or GPUs over which layers are distributed; they need not be
            there, and are taken to have the same memory.
        experts: where the engine has routed experts with a GPU: "cpu" or "gpu".
        slots: expert slots of each layer on the GPU, for experts that are on the CPU.
        gpu_experts: experts of each layer that the GPU has too, see ``choose``; ``gpu_gib``: GiB of
            its memory, for as many as fit; None: of this machine's.

    Raises:
        PykernelsError: as loading, but for devices and memory that are not there.
    """
    for name in device.split(","):
        if not is_device(name):
            raise PykernelsError(f"There is no device {name!r}", "Use cpu or cuda:0")
    config, formats, source, folder = _open(which)
    cache = PackedFolder(folder) if folder is not None and is_packed(folder) else None
    if cache is not None and rules is None:
        rules = cache.manifest.rules
    dtype = resolve_dtype(None, config)
    model = build_meta(config, dtype)
    bare = rules is None and config.model_type not in known_architectures()
    parsed = [] if bare else resolve_rules(rules, config.model_type)
    inject(model, parsed)
    device = engine_device(device, parsed, config.model_type)
    gpus = [CPU] if device == CPU else list(gpus_of(device))
    wanted = parse(gpu_experts)
    placement = followed(model, parsed, ",".join(gpus))
    if cache is not None:
        formats = cached(cache)
    elif folder is not None:
        with open_checkpoint(folder) as checkpoint:
            formats = planned(make_plan(model, checkpoint, dtype))
    reason = "--eager asks for it" if eager else why_not(config)
    _refuse(gpus, reason, experts, slots, wanted)
    routed = gpus[0] if experts == "gpu" else CPU
    listed = list(entries(model, placement, formats, reason is None, dtype, routed, slots))
    cache_bytes, gpu_share = _cache_bytes(model, reason is None), None
    if wanted:
        free_bytes = gpu_bytes_for_experts(listed, cache_bytes["bf16"], gpus, gpu_gib)
        listed, gpu_share = with_gpu_experts(listed, wanted, model, placement, formats, free_bytes)
    if len(gpus) > 1:
        listed = dealt(listed, gpus)
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    return Inspection(
        str(which),
        config.model_type,
        source,
        reason is None,
        reason,
        listed,
        classes,
        cache_bytes,
        gpu_share,
        cache_state_bytes(model) if reason is None else 0,
        *(cache_window(model) if reason is None else (0, 0)),
    )


def _refuse(gpus: list[str], reason: str | None, experts: str, slots: int, wanted: object) -> None:
    """Raises PykernelsError for places that do not go together.

    Args:
        reason: why the engine does not run the model, or None; the others as of ``examine``.
    """
    if reason is not None and gpus != [CPU]:
        raise PykernelsError(
            f"on {', '.join(gpus)} only the engine runs models: {reason}", "Leave out --device"
        )
    if experts == "gpu" and gpus == [CPU]:
        raise PykernelsError("experts on a GPU without one", "Add --device cuda:0")
    hybrid = gpus != [CPU] and experts != "gpu"
    if slots and not hybrid:
        raise PykernelsError(
            "an expert cache without experts on the CPU with a GPU, in the engine",
            "Use --device cuda:0 with --experts cpu",
        )
    if wanted and (not hybrid or slots):
        raise PykernelsError(
            "some experts on a GPU without the others on the CPU, or with an expert cache",
            "Use --gpu-experts with --device cuda:0 and --experts cpu alone",
        )


def _open(which: str | Path) -> tuple[PretrainedConfig, Formats, str, Path | None]:
    """(configuration, formats where there are no headers, source, folder of headers)."""
    path = Path(which)
    if not path.exists():
        if str(which) not in ARCHS:
            raise PykernelsError(
                f"There is no folder {which}, and no known shape of that name",
                f"Give a checkpoint's folder, its config.json, or one of {', '.join(ARCHS)}",
            )
        config = make_config(str(which))
        config.dtype = torch.bfloat16
        linear, experts = RELEASED.get(str(which), ("bf16", "bf16"))
        return config, Formats(linear=linear, experts=experts), "its known shape", None
    if find_gguf(path) is not None:
        return read_config(path), Formats(), "its headers", path
    folder = path.parent if path.is_file() else path
    config = read_config(folder)
    weights = (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))
    if path.is_dir() and weights:
        return config, Formats(), "its headers", folder
    data = json.loads((folder / "config.json").read_bytes())
    check_sizes(folder / "config.json", data)
    return config, configured(data.get("quantization_config")), "its config.json alone", None


def _cache_bytes(model: PreTrainedModel, engine: bool) -> dict[str, int]:
    """Bytes of a token's keys and values in the engine, or in transformers' own cache."""
    if engine:
        return {kind: cache_token_bytes(model, kind) for kind in ("bf16", "fp8")}
    total = 0
    for module in model.modules():
        parts: Any = module
        if hasattr(module, "kv_lora_rank") and hasattr(module, "qk_rope_head_dim"):
            total += 2 * (parts.kv_lora_rank + parts.qk_rope_head_dim)
        elif hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            total += 2 * (parts.k_proj.out_features + parts.v_proj.out_features)
    return {"bf16": total} if total else {}
