"""What is summed in the forward pass is what the gradient hook would sum, for every kind of layer."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad.capture import early
from natgrad.stacks.kept import pack
from tests import device


class Reshaped(nn.Module):
    """A layer on inputs of another shape than the model's."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x):
        return self.layer(x.view(len(x), *self.shape))


def frozen(layer, leaf):
    getattr(layer, leaf).requires_grad_(False)
    return layer


class Attending(nn.Module):
    def __init__(self, *, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x):
        x = x.view(len(x), -1, 6)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.attention(x, x, x)[0]


class LookingUp(nn.Module):
    """An embedding of seven entries, the first of which has no gradient when `padded`."""

    def __init__(self, *, padded):
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0 if padded else None)

    def forward(self, x):
        return self.table((x.view(len(x), 12, 6) > 0).sum(-1))


KINDS = {
    "linear": Reshaped(nn.Linear(72, 4), (72,)),
    "linear, positions": Reshaped(nn.Linear(6, 4), (3, 4, 6)),
    "linear without a bias": Reshaped(nn.Linear(6, 4, bias=False), (12, 6)),
    "linear with a frozen weight": Reshaped(frozen(nn.Linear(6, 4), "weight"), (12, 6)),
    "one dimension": Reshaped(nn.Conv1d(6, 4, 3, padding=1), (6, 12)),
    "groups": Reshaped(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), (2, 6, 6)),
    "lags": Reshaped(nn.Conv2d(2, 4, 3, padding=2, dilation=2), (2, 6, 6)),
    "reflected": Reshaped(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (2, 6, 6)),
    "convolution with a frozen weight": Reshaped(frozen(nn.Conv2d(2, 4, 3, groups=2), "weight"), (2, 6, 6)),
    "three dimensions": Reshaped(nn.Conv3d(2, 3, 2), (2, 4, 3, 3)),
    "transposed": Reshaped(nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1), (2, 6, 6)),
    "transposed groups": Reshaped(nn.ConvTranspose1d(6, 4, 2, groups=2, bias=False), (6, 12)),
    "attention": Attending(batch_first=True),
    "attention, sequences first": Attending(batch_first=False),
    "embedding": LookingUp(padded=False),
    "embedding with padding": LookingUp(padded=True),
}
SIDES = [{}, {"max_factor_size": 3, "wide": "blocks"}, {"max_factor_size": 2}]


@pytest.mark.parametrize(
    ("name", "sides"),
    [(name, sides) for name in KINDS for sides in SIDES]
    + [(name, {"sides": "a"}) for name in KINDS if not name.startswith("embedding")],
)
def test_inputs_show_the_same_in_the_forward_pass(name, sides, monkeypatch):
    """Of the output nothing is looked at but its shape."""
    monkeypatch.setattr(early, "outline", lambda output: output.new_full((), torch.nan).expand(output.shape))
    torch.manual_seed(0)
    model = KINDS[name].double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(**sides))
    sums = preconditioner._capture.sums
    members = {member.layer.name: (stack, member) for stack in preconditioner._stacks for member in stack.members}
    found = {}

    def foresee(layer, use, observe, passes):
        stack, member = members[layer]
        (spec,) = (spec for spec in stack.statistics if spec.name in stack.curvature.early)
        shape = member.stop - member.start, *spec.shape
        whole = torch.full(shape, torch.nan, dtype=torch.float64, device=device.name())
        observe({spec.name: whole})
        assert layer not in found
        found[layer] = spec.name, pack(whole, spec)

    monkeypatch.setattr(sums, "foresees", lambda layer: bool(members[layer][0].curvature.early))
    monkeypatch.setattr(sums, "foresee", foresee)
    x = torch.randn(5, 72, dtype=torch.float64)
    model(x).pow(2).sum().backward()
    assert found.keys() == members.keys()
    for layer, (statistic, early_sums) in found.items():
        assert torch.isfinite(early_sums).all(), layer
        torch.testing.assert_close(early_sums, sums.of(layer)[statistic], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reduction": "tokens"}, "masks"),
        ({}, "evaluation"),
        ({}, "no batch"),
        ({}, "no gradients"),
        ({}, "vmap"),
    ],
)
def test_what_is_not_guessed(options, reason, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    preconditioner = natgrad.Preconditioner(model, **options)
    monkeypatch.setattr(type(preconditioner._capture.sums), "foresees", lambda self, layer: True)
    asked = []
    monkeypatch.setattr(type(preconditioner._capture.sums), "foresee", lambda *told: asked.append(told[1]))
    x = torch.randn(5, 3, dtype=torch.float64)
    if reason == "no batch":
        model[2](model[0](x))
    elif reason == "no gradients":
        with torch.no_grad():
            model(x)
    elif reason == "vmap":
        torch.func.vmap(model)(x[:, None])
    else:
        model.train(reason != "evaluation")
        model(x)
    assert asked == []
    model.train()
    if reason in ("evaluation", "no batch", "no gradients", "vmap"):
        model(x)
        assert asked == ["0", "2"]


def test_pooled_rows_show_nothing_early():
    """Their sums are over all uses of a pass."""
    assert natgrad.KFAC(sharing="reduce").early == ()
    assert natgrad.KFAC().early == ("A",)
