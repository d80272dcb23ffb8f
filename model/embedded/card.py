"""The model card."""
from pathlib import Path


def write_card(folder: Path) -> None:
    """Write."""
