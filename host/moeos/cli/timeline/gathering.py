# SPDX-License-Identifier: Apache-2.0
"""Brings the traces of all ranks together, in pieces of a size that the control plane takes."""

from __future__ import annotations

import pickle

from moeos.world.control import MAX_PAYLOAD_BYTES, ControlPlane
from moeos.world.tracing import RankTrace

_PIECE_BYTES = MAX_PAYLOAD_BYTES // 2


def gather(control: ControlPlane, own: RankTrace) -> list[RankTrace]:
    """The traces of all ranks, in rank order. Collective."""
    content = pickle.dumps(own)
    count = max(control.allgather(-(-len(content) // _PIECE_BYTES), "the traces' sizes"))
    pieces = [
        control.allgather(content[place * _PIECE_BYTES : (place + 1) * _PIECE_BYTES], "the traces")
        for place in range(count)
    ]
    return [pickle.loads(b"".join(parts)) for parts in zip(*pieces, strict=True)]
