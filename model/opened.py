"""What `load_engine` opens: a checkpoint to be packed, or a packed cache to be mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from transformers import PretrainedConfig, PreTrainedModel

from runtime.matrix import Pack, outline

from .architectures.decoder import Decoder, make_decoder
from .architectures.packed import FromCache
from .architectures.weights import FromSource, Outline, Stored
from .checkpoint import memory
from .checkpoint.config import resolve_dtype
from .checkpoint.load import check_kernels, nbytes, warn_of
from .checkpoint.packed.manifest import is_packed
from .checkpoint.packed.mapped import PackedFolder
from .checkpoint.packed.populate import populate, resident
from .checkpoint.plan import Plan, make_plan
from .checkpoint.progress import Adder, Callback
from .checkpoint.safetensors import Checkpoint
from .modules.inject import inject
from .pretrained import Rules, build_meta, resolve_rules


class Opened(Protocol):
    """A model's weights before they are read.

    Attributes:
        model: injected, on the meta device.
        needed: bytes of main memory that loading takes at its peak; ``smaller``: with the experts
            converted, by format.
    """

    model: PreTrainedModel

    @property
    def needed(self) -> int: ...

    @property
    def smaller(self) -> Mapping[str, int]: ...

    def decoder(self, pack: Pack, report: Callback) -> Decoder:
        """Loads them."""

    def outline(self) -> Decoder:
        """Their shapes alone."""


class Packable:
    """Of a checkpoint: every matrix is packed in the format that it is stored in."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, checkpoint: Checkpoint, kv_dtype: str
    ) -> None:
        self.model, self._plan, self._checkpoint = model, plan, checkpoint
        self._kv_dtype = kv_dtype
        self._packed = memory.needed_by_engine(plan, model, checkpoint)

    @property
    def needed(self) -> int:
        return self._packed.peak

    @property
    def smaller(self) -> Mapping[str, int]:
        return self._packed.smaller()

    def decoder(self, pack: Pack, report: Callback) -> Decoder:
        warn_of(self._plan)
        total = sum(nbytes(self._checkpoint, item) for item in self._plan.items)
        source = Stored(self._plan, self._checkpoint, Adder(report, total))
        return make_decoder(self.model, FromSource(source, pack), self._kv_dtype)

    def outline(self) -> Decoder:
        packing = FromSource(Outline(self._plan), outline)
        return make_decoder(self.model, packing, self._kv_dtype)


class Mapped:
    """Of a packed cache: what is not in memory yet is read into it, nothing is packed."""

    def __init__(self, model: PreTrainedModel, folder: PackedFolder, kv_dtype: str) -> None:
        self.model, self._folder = model, folder
        self._decoder = make_decoder(model, FromCache(folder, model), kv_dtype)

    @property
    def needed(self) -> int:
        """What others have in memory takes none."""
        return sum(f.memory.nbytes - resident(f.memory) for f in self._folder.files)

    @property
    def smaller(self) -> Mapping[str, int]:
        return {}

    def decoder(self, pack: Pack, report: Callback) -> Decoder:
        populate(self._folder.files, Adder(report, self._folder.nbytes))
        return self._decoder

    def outline(self) -> Decoder:
        return self._decoder


@contextmanager
def open_weights(
    folder: Path,
    config: PretrainedConfig,
    rules: Rules = None,
    kernel: str = "auto",
    kv_dtype: str = "bf16",
) -> Iterator[Opened]:
    """Reads headers, and checks them against the model.

    Args:
        rules, kernel, kv_dtype: as in ``load_engine``.

    Raises:
        PykernelsError: what is wrong with the folder, the rules or the kernel.
    """
    dtype = resolve_dtype(None, config)
    packed = PackedFolder(folder) if is_packed(folder) else None
    if packed is not None and rules is None:
        rules = packed.manifest.rules
    model = build_meta(config, dtype)
    inject(model, resolve_rules(rules, config.model_type), kernel)
    if packed is not None:
        yield Mapped(model, packed, kv_dtype)
        return
    with Checkpoint(folder) as checkpoint:
        plan = make_plan(model, checkpoint, dtype)
        check_kernels(model, plan)
        yield Packable(model, plan, checkpoint, kv_dtype)
