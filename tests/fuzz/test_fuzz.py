"""The suite's share of the fuzz: a few hundred cases of a small menu. ``make fuzz`` runs more."""

import hypothesis
import hypothesis.strategies as st
import pytest
from fuzz import cases

PROGRAMS = 12


@pytest.mark.parametrize("kind", ["attention", "artefact"])
@hypothesis.given(number=st.integers(0, 2**20))
@hypothesis.settings(max_examples=150)
def test_a_random_case_holds(kind, number):
    cases.run(0, number, PROGRAMS, kind=kind)
