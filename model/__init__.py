"""Hugging Face models on our kernels.

    import model

    with model.load_engine(model.EMBEDDED) as llm:
        print(llm.generate("def quicksort(xs):", max_tokens=64).text)

`load_engine` runs whole steps on our kernels, with a paged cache and continuous batching.
`from_pretrained` returns transformers' own model with its routed experts on our kernels.

Importing this package is quick: torch and transformers are imported when a name is first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion import convert
    from .custom_generate import custom_generate
    from .load import load_engine
    from .pretrained import from_pretrained, load_tokenizer
    from .quantizer import PykernelsConfig

EMBEDDED: Path = Path(__file__).parent / "embedded" / "checkpoint"
"""Folder of the checkpoint that ships with the package."""

__all__ = [
    "EMBEDDED",
    "PykernelsConfig",
    "convert",
    "custom_generate",
    "from_pretrained",
    "load_engine",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from pykernels.env import check_temporary_folder

        check_temporary_folder()  # without one torch cannot be imported
    if name in ("from_pretrained", "load_tokenizer"):
        from . import pretrained

        return getattr(pretrained, name)
    if name == "load_engine":
        from .load import load_engine

        return load_engine
    if name == "convert":
        from .conversion import convert

        return convert
    if name == "custom_generate":
        from .custom_generate import custom_generate

        return custom_generate
    if name == "PykernelsConfig":
        from .quantizer import PykernelsConfig

        return PykernelsConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
