"""The embedded checkpoint (`PATH`) and the package that trained it.

The package stands alone: it needs torch, transformers, tokenizers and safetensors, and nothing of
this project, so that `python -m model.embedded.train` runs wherever those are installed.
"""

from pathlib import Path

PATH: Path = Path(__file__).resolve().parent / "checkpoint"

__all__ = ["PATH"]
