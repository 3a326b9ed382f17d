"""`natgrad.create_optimizer`, and what trainers need of the optimizers it makes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 5, generator=generator, dtype=torch.float64), torch.randint(3, (16,), generator=generator)


def train(network, optimizer, steps=4):
    for step in range(steps):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in network.parameters()])


@pytest.mark.parametrize("name", ["natural-muon", "NaturalMuon", "natural_muon"])
def test_natural_muon_by_any_spelling(name):
    network, other = model(), model()
    expected = train(other, natgrad.NaturalMuon(other, lr=1e-2, weight_decay=0.1, decay="matrices"))
    assert train(network, natgrad.create_optimizer(network, name, lr=1e-2, weight_decay=0.1)).equal(expected)


@pytest.mark.parametrize(
    ("name", "curvature"), [("sgd+kfac", "kfac"), ("SGD+Rank_One", "rank-one"), ("sgd+hylo", "hylo")]
)
def test_an_optimizer_of_torch_beside_a_curvature(name, curvature):
    network, other = model(), model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    preconditioner = natgrad.Preconditioner(other, curvature, optimizer=optimizer, damping=0.1)
    expected = train(other, natgrad.PreconditionedOptimizer(optimizer, preconditioner))
    found = natgrad.create_optimizer(network, name, lr=0.1, momentum=0.9, damping=0.1)
    torch.testing.assert_close(train(network, found), expected)


@pytest.mark.parametrize("name", ["natural-muon", "adamw+kfac"])
def test_biases_and_norms_are_not_decayed(name):
    network = model()
    optimizer = natgrad.create_optimizer(network, name, weight_decay=0.1)
    decayed = {id(one) for group in optimizer.param_groups if group["weight_decay"] for one in group["params"]}
    assert {key for key, one in network.named_parameters() if id(one) in decayed} == {
        "0.weight",
        "3.weight",
        "5.weight",
    }
    every = natgrad.create_optimizer(network, name, weight_decay=0.1, decay="all")
    assert all(group["weight_decay"] == 0.1 for group in every.param_groups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "sgd"},
            "or an optimizer of torch and one of kfac, ekfac, sngd, hylo, rank-one, such as 'adamw.kfac'",
        ),
        ({"name": "sgd+kfca"}, r"did you mean 'sgd\+kfac'"),
        ({"name": "natural-moun"}, "did you mean 'natural-muon'"),
        (
            {"name": "sgd+kfac", "momentun": 0.9},
            r"'momentun' is not allowed \(did you mean 'momentum'\?\): option must be one of sgd.kfac's: .*clip_norm",
        ),
        ({"interva": 3}, r"\(did you mean 'interval'\?\): option must be one of natural-muon's: "),
        ({"name": "rprop+kfac", "weight_decay": 0.1}, "weight_decay must be 0, as rprop has none"),
        ({"clip_norm": 0.0}, "clip_norm must be a number above 0, or None"),
        ({"clip_norm": 1.0, "gradients": "reduce"}, "clip_norm must be None with gradients='reduce'"),
        ({"decay": "norms"}, "decay must be 'all' or 'matrices'"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        natgrad.create_optimizer(model(), **arguments)


def test_parameters_in_the_place_of_the_model_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"an nn\.Module, not its parameters: natgrad attaches hooks to the layers"):
        natgrad.create_optimizer(model().parameters())


def test_a_curvature_with_options_replaces_that_of_the_name():
    curvature = natgrad.KFAC(form="inverse")
    optimizer = natgrad.create_optimizer(model(), "sgd+kfac", lr=0.1, curvature=curvature)
    assert optimizer.preconditioner.curvature is curvature


@pytest.mark.parametrize(("name", "bounded"), [("sgd+kfac", True), ("adamw+kfac", False)])
def test_the_kl_clip_is_for_sgd(name, bounded):
    network = model()
    optimizer = natgrad.create_optimizer(network, name, lr=10.0)
    train(network, optimizer, steps=1)
    assert (float(optimizer.metrics()["kl_scale"]) < 1) == bounded


@pytest.mark.parametrize(("saved", "built"), [("adamw+kfac", "sgd+kfac"), ("sgd+kfac", "adamw+kfac")])
def test_the_state_of_another_optimizer_is_refused(saved, built):
    network = model()
    one = natgrad.create_optimizer(network, saved, lr=0.1)
    train(network, one, steps=1)
    other = natgrad.create_optimizer(network, built, lr=0.1)
    with pytest.raises(ValueError, match=r"state_dict\['param_groups'\] must be those of (SGD|AdamW), with "):
        other.load_state_dict(one.state_dict())


class TestClipping:
    def test_is_of_the_natural_gradient(self):
        network, other = model(), model()
        optimizer = natgrad.create_optimizer(network, "sgd+kfac", lr=1.0, clip_norm=0.01)
        before = torch.cat([one.detach().flatten().clone() for one in network.parameters()])
        step = before - train(network, optimizer, steps=1)
        plain = natgrad.create_optimizer(other, "sgd+kfac", lr=1.0)
        whole = before - train(other, plain, steps=1)
        torch.testing.assert_close(step.norm(), torch.tensor(0.01, dtype=torch.float64), rtol=1e-4, atol=0)
        torch.testing.assert_close(step / step.norm(), whole / whole.norm())

    def test_of_natural_muon_is_of_the_gradient(self):
        network, other = model(), model()
        found = train(network, natgrad.create_optimizer(network, lr=1e-2, clip_norm=0.1))
        optimizer = natgrad.create_optimizer(other, lr=1e-2)
        for step in range(4):
            inputs, labels = batch(step)
            optimizer.zero_grad()
            cross_entropy(other(inputs), labels).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            optimizer.step()
        torch.testing.assert_close(found, torch.cat([one.detach().flatten() for one in other.parameters()]))

    @pytest.mark.filterwarnings("ignore:natgrad. the gradient of")
    def test_leaves_gradients_that_are_not_finite_to_the_guard(self):
        network = model()
        optimizer = natgrad.create_optimizer(network, lr=1e-2, clip_norm=1.0)
        inputs, labels = batch(0)
        cross_entropy(network(inputs), labels).backward()
        network[3].weight.grad[0, 0] = float("nan")
        optimizer.step()
        assert all(one.isfinite().all() for one in network.parameters())

    def test_of_a_refused_step_changes_nothing(self):
        network = model()
        optimizer = natgrad.create_optimizer(network, lr=1e-2, clip_norm=1e-3)
        inputs, labels = batch(0)
        cross_entropy(network(inputs), labels).backward()
        before = [one.grad.clone() for one in network.parameters()]
        with pytest.raises(ValueError, match="count"):
            optimizer.step(count=-1)
        assert all(one.grad.equal(old) for one, old in zip(network.parameters(), before, strict=True))

    @pytest.mark.filterwarnings("ignore:natgrad has curvature for")
    def test_of_sparse_gradients_is_refused(self):
        network = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3), nn.Linear(3, 2))
        with pytest.raises(
            ValueError, match=r"clip_norm=1\.0 is not allowed: clip_norm must be one without sparse=True"
        ):
            natgrad.create_optimizer(network, "sgd+kfac", clip_norm=1.0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["natural-muon", "sgd+kfac"])
class TestChanges:
    def test_thawed_layers_are_trained(self, name, weight_decay):
        network = model()
        network[0].requires_grad_(False)
        optimizer = natgrad.create_optimizer(network, name, lr=1e-2, weight_decay=weight_decay)
        train(network, optimizer, steps=1)
        network[0].requires_grad_(True)
        before = network[0].weight.detach().clone()
        train(network, optimizer, steps=2)
        assert not network[0].weight.equal(before)

    @pytest.mark.filterwarnings("ignore:natgrad. no layer of the model is covered while its weights are frozen")
    def test_a_model_may_be_frozen_at_first(self, name, weight_decay):
        network = model().requires_grad_(False)
        optimizer = natgrad.create_optimizer(network, name, lr=1e-2, weight_decay=weight_decay)
        network.requires_grad_(True)
        before = [one.detach().clone() for one in network.parameters()]
        train(network, optimizer, steps=2)
        assert not any(one.equal(old) for one, old in zip(network.parameters(), before, strict=True))

    def test_added_layers_are_trained(self, name, weight_decay):
        network = model()
        optimizer = natgrad.create_optimizer(network, name, lr=1e-2, weight_decay=weight_decay)
        train(network, optimizer, steps=1)
        network.insert(1, nn.Linear(8, 8).double())
        before = [one.detach().clone() for one in network[1].parameters()]
        train(network, optimizer, steps=2)
        assert not any(one.equal(old) for one, old in zip(network[1].parameters(), before, strict=True))


def test_a_count_after_passes_for_the_automatic_one_is_refused():
    network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = natgrad.create_optimizer(network, "sgd+kfac", reduction="tokens")
    inputs, labels = torch.randn(2, 4, 5, dtype=torch.float64), torch.zeros(8, dtype=torch.long)
    cross_entropy(network(inputs).flatten(0, 1), labels).backward()
    with pytest.raises(
        natgrad.NatgradError, match=r"step\(count=8\) follows passes that were captured for the count 'auto'"
    ):
        optimizer.step(count=8)
    optimizer.zero_grad()
    optimizer.count = None
    cross_entropy(network(inputs).flatten(0, 1), labels).backward()
    optimizer.step(count=8)


class TestLoadingWithoutCurvature:
    def test_warns_in_the_next_step(self):
        network = model()
        optimizer = natgrad.create_optimizer(network, "sgd+kfac", lr=0.1)
        optimizer.load_state_dict({key: optimizer.state_dict()[key] for key in ("state", "param_groups")})
        with pytest.warns(natgrad.NatgradWarning, match="came without the preconditioner's"):
            train(network, optimizer, steps=1)

    def test_does_not_warn_if_the_preconditioner_was_loaded_later(self):
        network = model()
        optimizer = natgrad.create_optimizer(network, "sgd+kfac", lr=0.1)
        train(network, optimizer, steps=1)
        state = optimizer.state_dict()
        other = model()
        again = natgrad.create_optimizer(other, "sgd+kfac", lr=0.1)
        again.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        again.preconditioner.load_state_dict(state["preconditioner"])
        train(other, again, steps=1)
