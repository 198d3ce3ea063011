# SPDX-License-Identifier: Apache-2.0
"""The protocol of counts, arrivals, returns and epochs, as models that spin searches completely.

Each world must hold in all of its states; and each mutation, a protocol with one of its rules left
out, must be found, and for the reason for which the rule is there.
"""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Mapping

import pytest

from tests.model.check import (
    FOLDER,
    MUTATIONS,
    WORLDS,
    Check,
    Checked,
    check_all,
    is_reported,
    missing,
)
from tests.nightly import all_but, spread

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())

SMALL_WORLDS = [one for one in WORLDS if one.states <= (25_000 if one.liveness else 50_000)]
"""Where cycles are looked for, a state takes several times as long."""

Results = Mapping[str, concurrent.futures.Future[Checked]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """What the checks of the chosen tests find; they run beside each other."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    names = {spec.params["one"].name for spec in chosen if spec and "one" in spec.params}
    return check_all(one for one in [*WORLDS, *MUTATIONS] if one.name in names)


@pytest.mark.parametrize("one", all_but(SMALL_WORLDS, WORLDS), ids=lambda one: one.name)
def test_the_protocol_holds_in_every_state_of_a_small_world(one: Check, results: Results) -> None:
    found = results[one.name].result()
    assert found.violation == ""
    assert found.errors == 0
    assert found.complete
    assert found.states >= one.states
    assert found.transitions > found.states


@pytest.mark.parametrize("one", spread(12, MUTATIONS), ids=lambda one: one.name)
def test_a_protocol_without_one_of_its_rules_fails(one: Check, results: Results) -> None:
    found = results[one.name].result()
    assert is_reported(one, found), found.violation


def test_every_mutation_that_a_model_knows_is_checked() -> None:
    known = {
        (path.stem, macro)
        for path in FOLDER.glob("*.pml")
        for macro in re.findall(r"MUTATION_\w+", path.read_text())
    }
    checked = {
        (one.model, macro)
        for one in MUTATIONS
        for macro in one.macros
        if macro.startswith("MUTATION_")
    }
    assert known == checked
