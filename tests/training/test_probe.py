"""A probe sees what torch's own per-sample derivatives say, and leaves everything as it is."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from natgrad import tasks
from natgrad.training.analysis import Probe


class Network(nn.Module):
    """A convolution in groups, a layer used twice, a norm, dropout, a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, groups=2)
        self.shared = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(16, 3, bias=False)

    def forward(self, x):
        x = self.first(x).tanh().flatten(1)
        x = self.norm(self.shared(self.shared(x).tanh()))
        return self.head(self.drop(x))


def build():
    return Network().double()


@pytest.fixture
def case():
    torch.manual_seed(1)
    model = build()
    return model, torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.randint(3, (6,))


def per_sample(model, x, y):
    """Return for each parameter the gradients of per-sample losses ``[6, ...]``."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters, x, y):
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)


@pytest.mark.cpu
def test_rows_of_a_layer_without_positions_make_its_per_sample_gradients(case):
    model, x, y = case
    seen = Probe(build, F.cross_entropy).observe(model.state_dict(), x, y)
    own = per_sample(model, x, y)["head.weight"]
    head = seen["head"]
    torch.testing.assert_close(torch.einsum("no,ni->noi", head.G[0], head.A[0]), own)
    torch.testing.assert_close(head.W[0], own.mean(0))
    torch.testing.assert_close(head.factors["A"][0], head.A[0].mT @ head.A[0] / 6)
    torch.testing.assert_close(head.factors["G"][0], head.G[0].mT @ head.G[0] / 6)


def test_sampled_labels_change_the_rows_and_not_the_gradient(case):
    model, x, y = case
    true = Probe(build, F.cross_entropy).observe(model.state_dict(), x, y)["head"]
    probe = Probe(build, F.cross_entropy, likelihood="categorical")
    drawn = probe.observe(model.state_dict(), x, y)["head"]
    torch.testing.assert_close(drawn.W, true.W)
    torch.testing.assert_close(drawn.A, true.A)
    assert not torch.allclose(drawn.G, true.G)
    again = Probe(build, F.cross_entropy, likelihood="categorical").observe(model.state_dict(), x, y)["head"]
    assert torch.equal(drawn.G, again.G)
    assert not torch.equal(drawn.G, probe.observe(model.state_dict(), x, y)["head"].G)  # drawn anew each time


def test_model_and_generators_stay_as_they_are(case):
    model, x, y = case
    probe = Probe(build, F.cross_entropy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noise = torch.get_rng_state()
    Probe(build, F.cross_entropy)
    probe.observe(model.state_dict(), x, y)
    assert torch.equal(torch.get_rng_state(), noise)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_gradients_of_a_loss_over_some_positions_are_those_of_each():
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    targets = torch.tensor([[0, 1, -1, -1, 3], [2, -1, 2, 2, -1]])

    def loss(outputs, targets):
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)

    model = nn.Sequential(nn.Linear(3, 4)).double()
    probe = Probe(
        lambda: nn.Sequential(nn.Linear(3, 4)).double(), loss, reduction="tokens", count=lambda y: int((y >= 0).sum())
    )
    seen = probe.observe(model.state_dict(), x, targets)["0"]
    y = targets.flatten()
    expected = (model(x).softmax(-1).flatten(0, 1) - F.one_hot(y.clamp(min=0), 4)) * (y >= 0)[:, None]
    torch.testing.assert_close(seen.G[0], expected.detach())
    counted = seen.A[0][y >= 0]
    torch.testing.assert_close(seen.factors["A"][0], counted.mT @ counted / 6)
    torch.testing.assert_close(seen.factors["G"][0], seen.G[0].mT @ seen.G[0] / 6)


@pytest.mark.parametrize("name", [*tasks.built_in(), "densenet-mnist", "vgg16-mnist"])
def test_every_task_shows_its_layers(name):
    options = {"glyphs": {"images": 64}, "text": {"sequences": 64, "context": 16}}
    task = tasks.get(name, **options.get(name, {}))
    torch.manual_seed(0)
    model = task.model()
    probe = Probe(task.model, task.loss, reduction=task.reduction, likelihood=task.likelihood)
    seen = probe.observe(model.state_dict(), *task.datasets()[0][:12])
    assert list(seen) == probe.layers
    for layer in seen.values():
        rows = 12 * 16 if name == "text" else 12
        assert layer.A.shape[1] == layer.G.shape[1] == rows
        assert layer.W.any()
        for name_of, size in (("A", layer.A.shape[2]), ("G", layer.G.shape[2])):
            assert layer.factors[name_of].shape[1:] == (size, size)
