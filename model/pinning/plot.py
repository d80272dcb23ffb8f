"""A profile as a picture: layers down, experts across, from rarely to often."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pykernels.errors import PykernelsError

from .profile import Profile


def heatmap(profile: Profile, file: Path) -> None:
    """Draws each layer's shares, its experts ordered as they are; 1 is an even share.

    Raises:
        PykernelsError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PykernelsError(
            "--plot needs matplotlib, which is not installed", "pip install matplotlib"
        ) from None
    rows = np.array(profile.rows, dtype=float)
    shares = rows / np.maximum(rows.mean(axis=1, keepdims=True), 1e-9)
    figure = Figure(figsize=(10, 2 + 0.12 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, aspect="auto", cmap="magma", interpolation="nearest", vmin=0)
    axes.set(
        xlabel="expert",
        ylabel="MoE layer",
        title=f"{profile.model_type}: {profile.tokens} tokens, top-{profile.topk}",
    )
    figure.colorbar(image, label="tokens, in shares of an even one")
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        hint = "Free some space, or give a file elsewhere"
        raise PykernelsError(f"{file} cannot be written: {error.strerror}", hint) from None
    except ValueError as error:
        raise PykernelsError(f"{file} cannot be drawn: {error}", "Give a .png or .svg") from None
