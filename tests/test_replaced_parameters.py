"""Parameters that are replaced or added after the optimizer was built: it moves them as if built afterwards."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune

import natgrad


def network():
    torch.manual_seed(0)
    layers = (nn.Embedding(7, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return nn.Sequential(*layers).double()


def natural_muon(model):
    return natgrad.NaturalMuon(model, heads=["5"])


def kfac(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return natgrad.PreconditionedOptimizer(optimizer, natgrad.Preconditioner(model, optimizer=optimizer))


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randint(len(model[0].weight), (12,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        cross_entropy(model(x), x % 4).backward()
        optimizer.step()


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of low rank, as LoRA puts into its place."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        self.down = nn.Linear(base.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, base.out_features, bias=False).double()
        for layer in (self.down, self.up):
            nn.init.normal_(layer.weight, generator=generator)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def assign(model):
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}, assign=True)


def materialise(model):
    state = copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    for gradient in (p.grad for p in model.parameters() if p.grad is not None):
        gradient.fill_(float("nan"))  # `to_empty` leaves in it what happens to be there


def resize_the_table(model):
    table = nn.Embedding(9, 6).double()
    nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(5))
    model[0] = table


def widen(model):
    """Replace two layers by others of the same names and other shapes."""
    torch.manual_seed(2)
    model[3], model[5] = nn.Linear(8, 11).double(), nn.Linear(11, 4).double()


def adapt(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for index in (1, 3):
        model[index] = Adapted(model[index])


def replace(model):
    model[3].weight = nn.Parameter(-model[3].weight.detach())


def prune_a_weight(model):
    prune.l1_unstructured(model[3], "weight", amount=0.3)


def normalise_a_weight(model):
    parametrizations.weight_norm(model[3])


REPLACED = (assign, materialise, resize_the_table, widen, adapt, replace)
HIDDEN = (prune_a_weight, normalise_a_weight)


@pytest.mark.filterwarnings("ignore:natgrad. the model has changed", "ignore:natgrad has curvature for")
@pytest.mark.parametrize("build", [natural_muon, kfac])
@pytest.mark.parametrize("change", [*REPLACED, *HIDDEN])
def test_before_the_first_step_it_is_as_if_the_optimizer_was_built_afterwards(change, build):
    early, late = network(), network()
    optimizer = build(early)
    change(early)
    change(late)
    train(early, optimizer, range(5))
    train(late, build(late), range(5))
    for (name, actual), expected in zip(early.named_parameters(), late.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.filterwarnings("ignore:natgrad. the model has changed")
@pytest.mark.parametrize("build", [natural_muon, kfac])
@pytest.mark.parametrize("change", [*REPLACED, *HIDDEN])
def test_in_the_middle_of_a_training_every_trained_parameter_goes_on(change, build):
    model = network()
    optimizer = build(model)
    train(model, optimizer, range(3))
    change(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    train(model, optimizer, range(3, 6))
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) != value.requires_grad, name
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len({id(parameter) for parameter in held}) == len(held)


def test_a_parameter_of_the_same_shape_keeps_the_state_of_its_place():
    straight, changed = network(), network()
    optimizers = [kfac(straight), kfac(changed)]
    for model, optimizer in zip((straight, changed), optimizers, strict=True):
        train(model, optimizer, range(3))
    changed.load_state_dict(copy.deepcopy(changed.state_dict()), assign=True)
    for model, optimizer in zip((straight, changed), optimizers, strict=True):
        train(model, optimizer, range(3, 6))
    for actual, expected in zip(changed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("change", HIDDEN)
def test_a_layer_whose_weight_is_computed_from_now_on_is_left_to_the_optimizer_with_a_warning(change):
    model = network()
    optimizer = natural_muon(model)
    train(model, optimizer, range(2))
    change(model)
    with pytest.warns(natgrad.NatgradWarning, match="moves 3 without curvature from now on: its weight is computed"):
        train(model, optimizer, [2])
    matrices = [
        name for name, p in model.named_parameters() if any(p is q for q in optimizer.param_groups[0]["params"])
    ]
    assert matrices == ["1.weight"]


def test_with_several_groups_a_new_parameter_is_named_in_a_warning():
    model = network()
    inner = torch.optim.SGD([{"params": model[:3].parameters()}, {"params": model[3:].parameters()}], lr=0.1)
    optimizer = natgrad.PreconditionedOptimizer(inner, natgrad.Preconditioner(model, optimizer=inner))
    train(model, optimizer, range(2))
    model.append(nn.Linear(4, 4).double())
    with pytest.warns(natgrad.NatgradWarning, match="2 trained parameters are in no group .* 6.weight"):
        train(model, optimizer, [2])
    train(model, optimizer, [3])
