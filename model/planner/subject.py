"""The model that is planned for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from ..architectures.decoder import Decoder


@dataclass(frozen=True)
class Subject:
    """A model whose programs can be lowered; no weight is read.

    Attributes:
        given: what it is called on the command line; ``source``: what was read of it.
        fmt: of its routed experts.
        made: its decoder with all matrices in another format.
        stretch: layers of the model for each of the decoder's, which may be some of them.
    """

    given: str
    source: str
    config: PretrainedConfig
    decoder: Decoder
    fmt: str
    made: Callable[[PretrainedConfig, str], Decoder] | None = None
    stretch: float = 1.0

    @property
    def positions(self) -> int:
        """The longest context that it was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def is_checkpoint(self) -> bool:
        """Whether there are weights where it lies."""
        return self.source == "its headers"

    def in_format(self, fmt: str) -> Subject:
        """The same shape with all matrices in a format."""
        assert self.made is not None, "a model that is loaded keeps its formats"
        decoder = replace(self.made(self.config, fmt), kv_dtype=self.decoder.kv_dtype)
        made = replace(self, decoder=decoder, fmt=fmt, stretch=1.0)
        return made.thinned(len(self.decoder.layers))

    def with_cache(self, kv_dtype: str) -> Subject:
        """The same with another cache of keys and values."""
        return replace(self, decoder=replace(self.decoder, kv_dtype=kv_dtype))

    def thinned(self, most: int) -> Subject:
        """The same with so many of its layers at most, so that its steps are lowered soon."""
        decoder, stretch = self.decoder.thinned(most)
        return replace(self, decoder=decoder, stretch=self.stretch * stretch)
