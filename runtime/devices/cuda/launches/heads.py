"""Which heads attention on a GPU has, known before a weight is read."""

from __future__ import annotations

from pykernels.errors import PykernelsError

from ....program import Program

_HINT = "Use device cpu, or --eager"


def check_heads(program: Program) -> None:
    """Raises PykernelsError for attention whose heads no GPU kernel can have.

    The kernels themselves say the same of their arguments: latents are read in blocks of a power
    of two, heads of other attention are padded to one.
    """
    for node in program.nodes:
        if node.op != "attention":
            continue
        dk, dv = node.attr("dk"), node.attr("dv")
        if dk != dv:
            latent = dv, dk - dv
            if any(size < 16 or size & (size - 1) for size in latent):
                raise PykernelsError(
                    "attention on a GPU has no latents of {} numbers with {} that are rotated, only"
                    " of powers of two from 16 on".format(*latent),
                    _HINT,
                )
        elif not 16 <= dk <= 256:
            raise PykernelsError(
                f"attention on a GPU has no heads of {dk} numbers, only of 16 to 256", _HINT
            )
