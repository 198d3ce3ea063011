# SPDX-License-Identifier: Apache-2.0
"""Fixtures of these tests: those of the package's."""

from tests.host.conftest import one_torch_thread, poisoned_output

__all__ = ["one_torch_thread", "poisoned_output"]
