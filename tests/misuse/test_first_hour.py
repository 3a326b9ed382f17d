"""Mistakes of the first hour are named, with what to do instead."""

import inspect
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import natgrad


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def constructors():
    """Return the public classes with keyword arguments, but what natgrad or a class of the user's own calls."""
    homes = (natgrad, natgrad.averaging, natgrad.damping)
    found = {value for home in homes for name in home.__all__ if isinstance(value := getattr(home, name), type)}
    found = {value for value in found if value.__init__ is not object.__init__ and not issubclass(value, Exception)}
    return sorted(found - {natgrad.DenseRows, natgrad.Layer, natgrad.Plan}, key=lambda value: value.__name__)


@pytest.mark.parametrize("kind", constructors())
def test_a_misspelt_argument_has_a_suggestion(kind):
    name = list(inspect.signature(kind).parameters)[-1]
    said = rf"^{kind.__name__}\(\) got an unexpected keyword argument '{name}z' \(did you mean '{name}'\?\)"
    with pytest.raises(TypeError, match=said):
        kind(**{f"{name}z": 1})


@pytest.mark.parametrize(
    ("kind", "name", "value", "near"),
    [
        (natgrad.Preconditioner, "curvature", "kfca", "kfac"),
        (natgrad.Preconditioner, "placement", "memopt", "mem-opt"),
        (natgrad.Preconditioner, "precision", "bf16", "bfloat16"),
        (natgrad.Preconditioner, "reduction", "token", "tokens"),
        (natgrad.Preconditioner, "refresh", "drfit", "drift"),
        (natgrad.NaturalMuon, "dtype", "bf16", "bfloat16"),
        (natgrad.NaturalMuon, "head", "adamv", "adamw"),
        (partial(natgrad.KFAC, fisher="sampled"), "likelihood", "categorial", "categorical"),
    ],
)
def test_a_misspelt_value_has_a_suggestion(kind, name, value, near):
    model = () if name == "likelihood" else (network(),)
    with pytest.raises(ValueError, match=rf"^{name}='{value}' is not allowed \(did you mean '{near}'\?\)"):
        kind(*model, **{name: value})


def test_an_argument_like_no_other_has_a_list():
    with pytest.raises(TypeError, match="argument 'warm'; known are model, lr, momentum, "):
        natgrad.NaturalMuon(network(), warm=0.1)


@pytest.mark.parametrize("build", [natgrad.NaturalMuon, natgrad.Preconditioner, partial(natgrad.KBFGS, lr=0.1)])
@pytest.mark.parametrize("whole", [True, False])
def test_what_torch_jit_has_compiled_is_refused(build, whole):
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if whole:
            model = torch.jit.trace(model, torch.randn(2, 5))
        else:
            model[2] = torch.jit.script(model[2])
    found = r"traced or scripted\. See" if whole else r"traced or scripted: '2' is one\. See"
    with pytest.raises(ValueError, match=f"^model='.*' is not allowed: .*{found}"):
        build(model)


@pytest.mark.parametrize("precision", [torch.bfloat16, "bfloat16"])
def test_one_dtype_stands_for_a_precision(precision):
    taken = natgrad.Preconditioner(network(), precision=precision)
    expected = natgrad.Precision(factors="bfloat16", wire="bfloat16", solve="bfloat16")
    given = natgrad.Preconditioner(network(), precision=expected)
    assert taken.plan.held(0) == given.plan.held(0) < natgrad.Preconditioner(network()).plan.held(0)
    with pytest.raises(ValueError, match=r"^precision='bf16' is not allowed.*: precision must be a natgrad.Precision,"):
        natgrad.Preconditioner(network(), precision="bf16")


def test_a_state_of_another_optimizer_is_refused_with_what_to_do():
    model = network()
    state = torch.optim.AdamW(model.parameters()).state_dict()
    with pytest.raises(ValueError, match=r"After a change of optimizer load the model's state alone\. See "):
        natgrad.NaturalMuon(model).load_state_dict(state)


def test_too_little_memory_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="which 'comm-opt' holds; precision='bfloat16' takes less, and on several"):
        natgrad.NaturalMuon(network(), placement=natgrad.Placement(memory=10))


def test_learning_rate_is_lr_here():
    with pytest.raises(TypeError, match=r"'learning_rate' \(did you mean 'lr'\?\)"):
        natgrad.NaturalMuon(nn.Linear(2, 3), learning_rate=2e-2)
    with pytest.raises(ValueError, match=r"'learning_rate' is not allowed \(did you mean 'lr'\?\)"):
        natgrad.create_optimizer(nn.Linear(2, 3), learning_rate=2e-2)
