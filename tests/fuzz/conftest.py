# SPDX-License-Identifier: Apache-2.0
"""Says at the end of a run how many examples of each kind of input ended how."""

from __future__ import annotations

import pytest

from tests.fuzz.outcomes import counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for kind, found in sorted(counts.items()):
        told = ", ".join(f"{number} {how}" for how, number in sorted(found.items()))
        terminalreporter.write_line(f"fuzz: {kind}: {found.total()} examples: {told}")
