# SPDX-License-Identifier: Apache-2.0
"""Checks of what lies in a call's tensors, for machines whose memory the host can look at.

The layer checks shapes and dtypes. Must not depend on engines.
"""

from __future__ import annotations

from torch import Tensor


def check_ids(ids: Tensor, experts: int) -> None:
    """Raises `ValueError` unless each of ids [S, k] is -1 or an expert that its row has only once.

    The message names the first id that is neither.
    """
    outside = (ids < -1) | (ids >= experts)
    if outside.any():
        token, slot = outside.nonzero()[0].tolist()
        raise ValueError(
            f"topk_ids[{token}, {slot}] is {int(ids[token, slot])}; it must be -1 (unused) or an "
            f"expert, 0 to {experts - 1}"
        )
    ordered = ids.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if repeated.any():
        token, slot = repeated.nonzero()[0].tolist()
        raise ValueError(
            f"topk_ids[{token}] is {ids[token].tolist()}; an expert, here "
            f"{int(ordered[token, slot + 1])}, may appear only once in a row"
        )


def without_others(ids: Tensor, experts: int) -> Tensor:
    """The ids with -1 for each that is no expert."""
    return ids.masked_fill((ids < 0) | (ids >= experts), -1)


def check_selection_bias(bias: Tensor) -> None:
    """Raises `ValueError` unless all of bias [E] is finite."""
    finite = bias.isfinite()  # asked once: another thread may change it
    if not finite.all():
        expert = int((~finite).nonzero()[0])
        raise ValueError(
            f"gate.selection_bias[{expert}] is {float(bias[expert])}; it must be finite"
        )


def count_tokens(tokens: Tensor | None, rows: int) -> int:
    """S: the value of `tokens`, or all `rows`. Raises `ValueError` unless 0 ≤ S ≤ rows."""
    if tokens is None:
        return rows
    count = int(tokens)
    if not 0 <= count <= rows:
        raise ValueError(f"tokens is {count}; x has {rows} rows: it must be 0 to {rows}")
    return count
