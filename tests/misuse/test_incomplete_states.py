"""States that lack something are refused, in one process."""

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


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
def test_a_whole_state_is_silent(state):
    both, _ = build()
    both.load_state_dict(state)


@pytest.mark.parametrize("kind", ["unknown", "misshapen", "no blocks", "no step", "missing", "a part missing"])
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
    else:
        del own["blocks"]["2.weight"]["renewed"]
    allowed = r"gather=True" if kind == "missing" else "is not allowed"
    with pytest.raises(ValueError, match=allowed):
        both.load_state_dict(state)
    step()
