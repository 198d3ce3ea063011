# SPDX-License-Identifier: Apache-2.0
"""Numbers in tables are short, and in the unit that a reader expects."""

from __future__ import annotations

import pytest

from moeos.cli.shared import output


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (12.34e-6, "12.3 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1 ms"),
        (0.02, "20 ms"),
        (0.9999, "1 s"),
        (61.0, "61 s"),
        (0.0, "0 µs"),
    ],
)
def test_a_duration_is_rounded_before_its_unit_is_chosen(seconds: float, shown: str) -> None:
    assert output.duration(seconds) == shown
