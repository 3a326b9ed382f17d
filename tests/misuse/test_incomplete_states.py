"""States that lack some layers' curvature, in one process."""

import copy

import pytest
import torch

import natgrad


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refresh = natgrad.Refresh(factors=100, inverses=100)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, refresh=refresh)
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)

    def step():
        both.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        both.step()

    return both, step


@pytest.fixture
def state():
    both, step = build()
    step()
    return copy.deepcopy(both.state_dict())


def test_a_missing_layer_begins_anew_at_the_next_step(state):
    both, step = build()
    del state["preconditioner"]["blocks"]["2.weight"]
    with pytest.warns(
        natgrad.NatgradWarning, match=r"^natgrad: this state lacks the curvature of 2\.weight, .*gather=True"
    ):
        both.load_state_dict(state)
    assert both.preconditioner.metrics()["step"] == 1
    step()
    assert both.preconditioner.explain().preconditioned == 1.0


def test_what_the_layer_had_before_is_forgotten(state):
    both, step = build()
    for _ in range(3):
        step()
    del state["preconditioner"]["blocks"]["2.weight"]
    with pytest.warns(natgrad.NatgradWarning, match="lacks"):
        both.load_state_dict(state)
    assert not both.state_dict()["preconditioner"]["blocks"]["2.weight"]["weight"].any()


def test_a_part_of_a_layer_counts_as_missing(state):
    both, step = build()
    del state["preconditioner"]["blocks"]["2.weight"]["renewed"]
    with pytest.warns(natgrad.NatgradWarning, match=r"lacks the curvature of 2\.weight,"):
        both.load_state_dict(state)
    step()


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
def test_a_whole_state_is_silent(state):
    both, _ = build()
    both.load_state_dict(state)


@pytest.mark.parametrize("kind", ["unknown", "misshapen", "no blocks", "no step", "missing"])
def test_what_does_not_fit_is_refused(state, kind):
    both, step = build()
    own = state["preconditioner"]
    if kind == "unknown":
        own["blocks"]["7.weight"] = own["blocks"].pop("2.weight")
    elif kind == "misshapen":
        own["blocks"]["2.weight"]["weight"] = torch.zeros(5)
    elif kind == "no blocks":
        own["blocks"] = None
    elif kind == "no step":
        del own["step"]
    elif kind == "missing":
        del own["blocks"]["2.weight"]
    load = both.preconditioner.load_state_dict if kind == "missing" else lambda _: both.load_state_dict(state)
    with pytest.raises(ValueError, match="is not allowed"):
        load(own)
    step()
