"""Documents as tokens: every byte of a text is one token, through a small fixed embedding.

Text is skewed: few bytes are most of it, so few experts get most tokens. This file knows nothing
of layers or ranks.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

MAX_TEXT_BYTES = 1 << 28
"""The most bytes that are read as tokens."""

_CONTEXT = 8  # bytes that a token depends on: its own and those before it
_DECAY = 0.5  # of a byte's part in a token, with every byte that follows it
_SEED = 0x6D6F656F


def read_documents(patterns: Sequence[str], folder: Path) -> Tensor:
    """The bytes of all documents, one after the other: uint8 [n], n > 0.

    Args:
        patterns: paths, relative to `folder`, in which *, ? and [] stand for names and ** for
            folders. A path without them must exist; a pattern may match nothing.
        folder: where relative paths start.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is no byte to read, or more than MAX_TEXT_BYTES.
    """
    documents: dict[Path, None] = {}  # in order, each once
    for pattern in patterns:
        path = str(folder / pattern)
        found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        documents |= dict.fromkeys(Path(name) for name in found if not Path(name).is_dir())
    total = sum(document.stat().st_size for document in documents)
    if not 0 < total <= MAX_TEXT_BYTES:
        raise ValueError(
            f"the documents {', '.join(patterns)} in {folder} have {total} bytes; allowed: 1 to "
            f"{MAX_TEXT_BYTES}"
        )
    content = b"".join(document.read_bytes() for document in documents)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class ByteEmbedding:
    """Bytes to vectors of `hidden` elements, the same in every run.

    A token is the sum of the vectors of its byte and of the 7 before it, each weighed half as much
    as the one that follows it; elements have mean 0 and variance 1 over the table.
    """

    def __init__(self, hidden: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        self._table = torch.randn((256, hidden), generator=generator)
        powers = _DECAY ** torch.arange(_CONTEXT)
        self._parts = (powers / powers.norm()).tolist()

    def embed(self, text: Tensor, first: int, tokens: int) -> Tensor:
        """The tokens of the bytes from `first` on: float32 [tokens, hidden].

        The text, uint8 [n], is a ring: its first byte follows its last one.
        """
        places = torch.arange(first, first + tokens)
        rows = torch.zeros((tokens, self._table.shape[1]))
        for back, part in enumerate(self._parts):
            rows.add_(self._table[text[(places - back) % len(text)].long()], alpha=part)
        return rows
