# SPDX-License-Identifier: Apache-2.0
"""The links that `moeos doctor` tries: sound ones are, and a broken one is told from them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moeos.cli import links
from moeos.cli.links import Endpoint
from tests.gpu.cases import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A GPU that is at both ends of a link."""
    made = Endpoint(torch.cuda.current_device())
    made.allocate()
    made.clear()
    yield made
    made.close()


def test_all_links_of_this_host_are_sound() -> None:
    count = torch.cuda.device_count()
    found = links.try_local_links()
    assert len(found) == max(1, count * (count - 1))
    for link in found:
        assert link.problem == ""
        assert link.rounds > 100
        assert link.gigabytes_per_second is not None
        assert link.gigabytes_per_second > 1


def test_words_that_were_not_sent_are_counted(endpoint: Endpoint) -> None:
    endpoint.receive(endpoint.address, seed=1)
    endpoint.send(endpoint.address, 2, 0.01)
    rounds, problem = endpoint.received()
    words = links.PAYLOAD_BYTES // 16
    assert endpoint.sent() == (rounds, "")
    assert problem.startswith(f"{rounds * words} words of 16 bytes were not what the sender")


def test_a_sender_that_is_silent_is_named_at_the_deadline(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "DEADLINE", 0.1)
    endpoint.receive(endpoint.address, seed=1)
    rounds, problem = endpoint.received()
    assert rounds == 0
    assert problem.startswith("the flag of round 1 did not come within 0.1 s")


def test_a_receiver_that_is_silent_is_named_at_the_deadline(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "DEADLINE", 0.1)
    endpoint.send(endpoint.address, 1, 0.01)
    rounds, problem = endpoint.sent()
    assert rounds == 0
    assert problem.startswith("the credit of round 1")
