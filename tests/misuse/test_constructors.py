"""One wrong argument at a time to every public constructor: a clear error, or an object that works."""

import inspect
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import natgrad
from natgrad import averaging, damping, layers, recipes, refresh
from natgrad.distributed import rules
from natgrad.refresh import policy
from tests.misuse.constructors import CASES, DRAWN, outcome, values

# Not made by users.
OTHERS = {
    "Candidate", "Clock", "Curvature", "DenseRows", "Layer", "Likelihood", "PlacementRule", "Plan",
    "RefreshRule", "Rows", "Rule", "Schedule",
}  # fmt: skip


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Forget what is registered here."""
    for module, name in ((layers, "_REGISTERED"), (rules, "_RULES"), (policy, "_RULES")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))


def test_every_public_constructor_has_a_case():
    errors = {name for name in natgrad.__all__ if name.endswith(("Error", "Warning"))}
    modules = {name for name in natgrad.__all__ if inspect.ismodule(getattr(natgrad, name))}
    known = {name.rpartition(".")[2] for name in CASES}
    assert set(natgrad.__all__) - errors - modules - OTHERS <= known
    for module in (averaging, damping, recipes, refresh):
        assert {name for name in module.__all__ if callable(getattr(module, name))} - OTHERS <= known


@pytest.mark.parametrize("name", CASES)
def test_valid_arguments_work(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)
        case = CASES[name]
        made = case.make(**case.valid())
        assert made is not None or name.startswith("register")
        case.use(made)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_has_a_clear_error_or_works(name):
    """Of the values of every kind each parameter gets a part here; all take a minute (`make test-slow`)."""
    check(name, part=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_wrong_arguments_have_a_clear_error_or_work(name):
    check(name, part=1)


def check(name, part):
    case = CASES[name]
    for number, parameter in enumerate(inspect.signature(case.make).parameters):
        for value in values()[number % part :: part]:
            assert outcome(case, parameter, value) == "", f"{parameter}={value!r}"


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("register")])
def test_a_drawn_argument_has_a_clear_error_or_works(name):
    case = CASES[name]

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(sorted(inspect.signature(case.make).parameters)), DRAWN)
    def run(parameter, value):
        assert outcome(case, parameter, value) == "", f"{parameter}={value!r}"

    run()
