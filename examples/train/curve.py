# SPDX-License-Identifier: Apache-2.0
"""Two runs' losses as a picture: the curves, and below how far they are apart.

Drawing needs matplotlib. This file must not depend on what was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moeos.cli import drawing

_LEAST = 1e-9
"""What a difference of nothing is drawn as."""


def draw(
    losses: Sequence[float], references: Sequence[float], bars: Sequence[float], file: Path
) -> None:
    """Draws losses by step into a PNG file; `bars`: what they may differ by, of each step.

    Raises `RuntimeError` if matplotlib is missing, and `OSError` if the file cannot be written.
    """
    figure = drawing.figure(8.0, 5.5)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
    steps = range(1, len(losses) + 1)
    above.plot(steps, references, color="#ff7f0e", linewidth=3.0, label="stock PyTorch")
    above.plot(steps, losses, color="#1f77b4", linewidth=1.2, label="moeos")
    above.set_ylabel("loss, nats a byte")
    above.legend()
    apart = [max(_LEAST, abs(a - b)) for a, b in zip(losses, references, strict=True)]
    below.semilogy(steps, apart, color="#1f77b4", label="difference")
    below.semilogy(steps, bars, color="black", linestyle="--", linewidth=1.0, label="allowed")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    below.legend()
    figure.set_layout_engine("constrained")
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
