"""`natgrad.testing` accepts natgrad's layers and curvatures and those of tests, and names what is wrong in others."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import natgrad
from natgrad.testing import check_curvature, check_layer
from tests.every import EVERY, Network, batch
from tests.extending.own import OWN, DiagonalFisher, Grouped, GroupedLayer, Scaled, ScaledLayer, Signs, Whitening


class Tied(nn.Module):
    """An embedding, and a linear layer with the same weight."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.norm(self.table(x)).tanh())


normal = torch.randn
LAYERS = {
    "linear": lambda: (nn.Linear(4, 5), normal(6, 3, 4)),
    "no bias": lambda: (nn.Linear(4, 5, bias=False), normal(6, 4)),
    "Conv1D": lambda: (Conv1D(5, 4), normal(4, 3, 4)),
    "convolution": lambda: (nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2), normal(5, 4, 7, 7)),
    "dilated": lambda: (nn.Conv1d(4, 6, 3, padding="same", dilation=2), normal(5, 4, 17)),
    "transposed": lambda: (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), normal(5, 4, 5, 5)),
    "embedding": lambda: (nn.Embedding(7, 3, padding_idx=1), torch.randint(7, (4, 6))),
    "tied": lambda: (Tied(), torch.randint(7, (4, 6))),
    "attention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), (normal(4, 5, 8), *normal(2, 4, 6, 8))),
    "LSTM": lambda: (nn.LSTMCell(3, 4), (normal(5, 3), tuple(normal(2, 5, 4)))),
    "GRU": lambda: (nn.GRUCell(3, 4), (normal(5, 3), normal(5, 4))),
    "layer norm": lambda: (nn.LayerNorm(6), normal(4, 3, 6)),
    "batch norm": lambda: (nn.BatchNorm2d(6), normal(4, 6, 5, 5)),
    "group norm": lambda: (nn.GroupNorm(2, 6), normal(4, 6, 5)),
    "own": lambda: (Scaled(4, 5), normal(6, 3, 4)),
    "own groups": lambda: (Grouped(2, 4, 3), normal(6, 3, 8)),
}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    natgrad.register_layer(Scaled, ScaledLayer)
    natgrad.register_layer(Grouped, GroupedLayer)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_pass(name):
    module, inputs = LAYERS[name]()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    check_layer(module, inputs)
    assert all(tensor.equal(before[key]) for key, tensor in module.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())


def changed(method, change):
    """Return a class whose rows of "inputs" or "gradients" are changed by a function of layer and values."""

    def rows(self, *args):
        return natgrad.DenseRows(change(self, getattr(GroupedLayer, method)(self, *args).dense()))

    return type("Wrong", (GroupedLayer,), {method: rows})


def mixed(rows):
    """Return rows in the order of positions, then samples."""
    return rows.transpose(1, 2).reshape(rows.shape)


class Unordered(GroupedLayer):
    def grouped(self, tensor, samples):
        return mixed(super().grouped(tensor, samples))


WRONG_LAYERS = {
    "samples of inputs": (changed("input_rows", lambda _, a: a.flip(1)), "weight .*the samples have different orders"),
    "positions of inputs": (changed("input_rows", lambda _, a: a.flip(2)), "weight .*different orders of positions"),
    "positions first": (Unordered, "weight .*only their sum over samples is right"),
    "groups": (changed("input_rows", lambda _, a: a.flip(0)), r"weight .*the blocks \(groups\) have different orders"),
    "squared inputs": (changed("input_rows", lambda _, a: a.square()), "weight .*or other values"),
    "squared gradients": (changed("gradient_rows", lambda _, g: g.square()), "not linear in the gradients"),
    "a scale of each output": (
        changed("gradient_rows", lambda _, g: g * torch.linspace(0.5, 1.5, g.shape[-1]).to(g)),
        "weight .*each output has a scale of its own, 0.5 to 1.5 times that",
    ),
    "a scale": (changed("gradient_rows", lambda _, g: 3 * g), "weight .*it is 3 times that"),
    "a method that fails": (
        changed("input_rows", lambda layer, _: layer.colour),
        "its rows raise AttributeError: .*colour",
    ),
    "no ones": (changed("input_rows", lambda layer, a: a[..., : layer.weight_columns]), "end in a 1"),
    "ones that are not": (changed("input_rows", lambda _, a: a * a.new_tensor([1, 1, 1, 1, 0])), "bias .*must be 1"),
    "always ones": (
        changed("input_rows", lambda layer, a: a if layer.bias else nn.functional.pad(a, (0, 1), value=1)),
        "while bias is frozen: the rows of inputs have the shape",
    ),
}


@pytest.mark.parametrize("name", WRONG_LAYERS)
def test_what_is_wrong_in_a_layer_is_named(name):
    layer, message = WRONG_LAYERS[name]
    module = type("Module", (Grouped,), {})
    natgrad.register_layer(module, layer)
    with pytest.raises(natgrad.NatgradError, match=f"{message}.*#your-own-code$"):
        check_layer(module(2, 4, 3), normal(6, 3, 8))


def test_what_no_layer_covers_and_batches_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"module='PReLU' .*no layer type"):
        check_layer(nn.PReLU(), normal(4, 3))
    with pytest.raises(ValueError, match="at least 2"):
        check_layer(nn.Linear(3, 2), normal(1, 3))
    with pytest.raises(ValueError, match="finite values"):
        check_layer(nn.Linear(3, 2), normal(4, 3) / 0)


# --- Curvatures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EVERY, *OWN])
def test_curvatures_pass(name):
    check_curvature({**EVERY, **OWN}[name](), Network(), batch(0)[0])


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.EKFAC(), natgrad.KFAC(sharing="reduce")])
def test_curvatures_of_tables_and_norms_pass(curvature):
    check_curvature(curvature, Tied(), torch.randint(7, (6, 5)))


def test_a_loss_of_ones_own():
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    x, y = batch(0)
    check_curvature(natgrad.KFAC(), Network(), {"x": x, "y": y}, loss)
    with pytest.raises(ValueError, match="even number"):
        check_curvature(natgrad.KFAC(), Network(), x[:5])
    with pytest.raises(ValueError, match="true labels"):
        check_curvature(natgrad.KFAC(fisher="sampled", likelihood="categorical"), Network(), x)


class Outer(DiagonalFisher):
    """F alone, from gradients that a subclass changes."""

    power = 2

    def statistics(self, d_out, d_in):
        return (natgrad.Statistic("F", (d_out, d_in), gradient_power=self.power, used_by_precondition=True),)

    def accumulate(self, sums, inputs, gradients, scale, computed=None):
        a, g = self.rows(inputs.dense(), gradients.dense() * scale)
        self.add(sums, (g.mT @ a.to(g.dtype)).square())

    def rows(self, a, g):
        return a, g

    def add(self, sums, squares):
        sums["F"].add_(squares.sum(1))


class Forgotten(Outer):
    def accumulate(self, sums, inputs, gradients, scale, computed=None):
        super().accumulate(sums, inputs, gradients, 1.0)


class Remembers(Outer):
    calls = 0

    def precondition(self, computed, averages, state, gradient, damping):
        self.calls += 1
        return gradient / self.calls


class Undeclared(Signs):
    def update_state(self, state, gradient):
        return {"steps": state["momentum"]}


class Failing(Whitening):
    ok = True

    def compute(self, task, averages, damping, previous=None):
        written, fine = super().compute(task, averages, damping, previous)
        return written, self.ok if isinstance(self.ok, bool) else self.ok(fine)


def of(base, **attributes):
    return type("Wrong", (base,), attributes)


WRONG_CURVATURES = {
    "no scale": (Forgotten, r"'F' of .* times what it was for the sum of the losses.*multiply each factor"),
    "power": (of(Outer, power=1), r"'F' of .* 8 times what it was with a loss scale of 8: gradient_power"),
    "mean": (
        of(Outer, add=lambda _, sums, squares: sums["F"].add_(squares.mean(1))),
        r"'F' of .* 2 times what it was for two halves of the batch: .*not a mean",
    ),
    "positions": (of(Outer, rows=lambda _, a, g: (a, g.flip(2))), "'F' depends on the order of rows"),
    "samples": (of(Outer, rows=lambda _, a, g: (a, g.flip(1))), "'F' depends on the order of rows"),
    "blocks": (of(Outer, rows=lambda _, a, g: (a, g.roll(1, 0))), "'F' depends on the order of rows"),
    "replaced": (
        of(Outer, add=lambda _, sums, squares: sums["F"].copy_(squares.sum(1))),
        r"accumulate\(\) must add to the sum 'F', not replace it",
    ),
    "blocks computed together": (
        of(
            Whitening,
            compute=lambda own, task, averages, *rest: Whitening.compute(
                own, task, {"A": averages["A"].mean(0, keepdim=True).expand_as(averages["A"])}, *rest
            ),
        ),
        r"compute\('root'\) returns another 'root' for a block if there are others",
    ),
    "blocks preconditioned together": (
        of(Whitening, precondition=lambda _, computed, averages, state, W, damping: W @ computed["root"].mean(0)),
        r"precondition\(\) returns another result for a block if there are others",
    ),
    "float16": (
        of(Outer, takes_narrow_rows=True, add=lambda _, sums, squares: sums["F"].add_(squares.sum(1))),
        "'F' of .* in float16: .*overflow",
    ),
    "kept": (Remembers, "the gradient .* in a second run: .*keeps something"),
    "undeclared state": (Undeclared, r"update_state\(\) of .*as 'steps'.* declares momentum"),
    "undeclared sum": (of(Outer, add=lambda _, sums, squares: sums["H"].add_(1)), r"sums\['H'\].*there are F now"),
    "another sum": (of(Outer, add=lambda _, sums, squares: sums.update(H=squares)), "has left the sums.*'H'"),
    "dtype": (
        of(Outer, precondition=lambda _, *args: args[3].float()),
        "has returned torch.float32 in place of torch.f",
    ),
    "no new state": (
        of(Signs, update_state=lambda *_: None),
        r"update_state\(\) of .* NoneType in place of tensors by name",
    ),
    "shape": (of(Outer, precondition=lambda _, *args: args[3][0]), r"precondition\(\) of .*has returned \(\d+, \d+\)"),
    "sign": (of(Outer, precondition=lambda _, *args: -args[3]), "⟨V, W⟩ <= 0"),
    "ok": (Failing, "has returned True as which blocks succeeded"),
    "ok as numbers": (of(Failing, ok=lambda _, fine: fine.float()), r"torch.float32\[\d+\] as which blocks succeeded"),
    "ok as a column": (of(Failing, ok=lambda _, fine: fine[:, None]), r"torch.bool\[\d+, 1\] as which"),
    "never ok": (of(Failing, ok=lambda _, fine: ~fine), r"compute\(\) says that a block failed"),
    "no ok": (of(Whitening, compute=lambda *_: {}), r"has returned a dict, not \(tensors by name, which succeeded\)"),
}


@pytest.mark.parametrize("name", WRONG_CURVATURES)
def test_what_is_wrong_in_a_curvature_is_named(name):
    curvature, message = WRONG_CURVATURES[name]
    with pytest.raises(natgrad.NatgradError, match=f"(?s){message}.*#your-own-code$"):
        check_curvature(curvature(), Network(), batch(0)[0])


def test_the_right_one_of_these_passes():
    check_curvature(Outer(), Network(), batch(0)[0])
