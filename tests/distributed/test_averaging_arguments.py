"""One wrong argument at a time to each averager on two nodes: a clear error, or an averager that works."""

import inspect
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad.averaging import Nodes
from tests.misuse.constructors import AVERAGERS, DRAWN, outcome, values


def parameters_of(name):
    return list(inspect.signature(AVERAGERS[name].make).parameters)


def outcomes(name, arguments):
    """Return the wrong arguments whose outcome is wrong, with it."""
    case = AVERAGERS[name]
    case = replace(case, valid=lambda: {**AVERAGERS[name].valid(), "nodes": Nodes((1, 1))})
    found = ((parameter, value, outcome(case, parameter, value)) for parameter, value in arguments)
    return [f"{parameter}={value!r}: {problem}" for parameter, value, problem in found if problem]


def swept(name, part):
    """Return the outcomes that are wrong, of every `part`-th value of `values` for each parameter."""
    parameters = enumerate(parameters_of(name))
    return outcomes(
        name, [(parameter, value) for number, parameter in parameters for value in values()[number % part :: part]]
    )


@pytest.mark.parametrize("name", AVERAGERS)
def test_a_wrong_argument_has_a_clear_error_or_works(ranks, name):
    assert ranks.run(2, swept, name, 6) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGERS)
def test_all_wrong_arguments_have_a_clear_error_or_work(ranks, name):
    assert ranks.run(2, swept, name, 1, limit=240) == [[], []]


@pytest.mark.parametrize("name", AVERAGERS)
def test_a_drawn_argument_has_a_clear_error_or_works(ranks, name):
    drawn = st.lists(st.tuples(st.sampled_from(parameters_of(name)), DRAWN), min_size=20, max_size=20)

    @settings(max_examples=2, deadline=None, derandomize=True, database=None)
    @given(drawn)
    def run(arguments):
        assert ranks.run(2, outcomes, name, arguments) == [[], []]

    run()
