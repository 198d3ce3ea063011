# SPDX-License-Identifier: Apache-2.0
"""Documents as tokens: every byte of a text is one token, through a small fixed embedding.

Text is skewed: few bytes are most of it, so few experts get most tokens. This file must not depend
on layers or ranks.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moeos.system.files import open_regular

MAX_TEXT_BYTES = 1 << 28
"""The most bytes that are read as tokens."""
MAX_DOCUMENTS = 1 << 16
"""The most paths that a pattern may match."""

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
        ValueError: there is no byte to read, or more than MAX_TEXT_BYTES; a pattern matches more
            than MAX_DOCUMENTS paths; a document is not a file.
    """
    documents: dict[Path, None] = {}  # in order, each once
    for pattern in patterns:
        path = str(folder / pattern)
        found = [path]
        if glob.has_magic(path):
            every = glob.iglob(path, recursive=True)
            found = sorted(itertools.islice(every, MAX_DOCUMENTS + 1))
            if len(found) > MAX_DOCUMENTS:
                raise ValueError(f"the pattern {pattern} matches more than {MAX_DOCUMENTS} paths")
        documents |= dict.fromkeys(Path(name) for name in found if not Path(name).is_dir())
    total = 0
    for document in documents:
        with open_regular(document) as file:
            total += os.fstat(file.fileno()).st_size
    if not 0 < total <= MAX_TEXT_BYTES:
        raise ValueError(
            f"the documents {', '.join(patterns)} in {folder} have {total} bytes; allowed: 1 to "
            f"{MAX_TEXT_BYTES}"
        )
    content = bytearray()
    for document in documents:
        with open_regular(document) as file:
            content += file.read(MAX_TEXT_BYTES - len(content))  # it may have grown meanwhile
    return torch.frombuffer(content, dtype=torch.uint8)


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
