"""One wrong argument at a time to every public constructor: a clear error, or an object that works."""

import inspect
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import natgrad
from natgrad import damping, layers, recipes
from natgrad.distributed import rules
from natgrad.refresh import policy
from tests.misuse.constructors import CASES, outcome, values

# Not made by users, or made from several ranks (tests/distributed/test_daso_arguments.py).
OTHERS = {"Curvature", "DenseRows", "Layer", "Likelihood", "PlacementRule", "Plan", "RefreshRule", "Rows", "Schedule"}
AVERAGERS = {"DASO", "DiLoCo", "HierarchicalSGD", "PostLocalSGD", "StreamingDiLoCo"}


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Forget what is registered here."""
    for module, name in ((layers, "_REGISTERED"), (rules, "_RULES"), (policy, "_RULES")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))


def test_every_public_constructor_has_a_case():
    errors = {name for name in natgrad.__all__ if name.endswith(("Error", "Warning"))}
    modules = {name for name in natgrad.__all__ if inspect.ismodule(getattr(natgrad, name))}
    assert set(natgrad.__all__) - errors - modules - OTHERS - AVERAGERS <= CASES.keys()
    for module in (damping, recipes):
        prefix = module.__name__.removeprefix("natgrad.")
        known = {name.removeprefix(f"{prefix}.") for name in CASES}
        assert {name for name in module.__all__ if callable(getattr(module, name))} <= known


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


NUMBERS = st.integers() | st.floats() | st.lists(st.integers() | st.floats() | st.text(), max_size=3)
DRAWN = NUMBERS | st.text(max_size=5) | st.tuples(st.floats()) | st.dictionaries(st.text(max_size=3), st.floats())


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("register")])
def test_a_drawn_argument_has_a_clear_error_or_works(name):
    case = CASES[name]

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(sorted(inspect.signature(case.make).parameters)), DRAWN)
    def run(parameter, value):
        assert outcome(case, parameter, value) == "", f"{parameter}={value!r}"

    run()
