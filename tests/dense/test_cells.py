"""Recurrent cells: their two projections, against linear layers that do the same."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad.layers.cells import CellForward
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, total_loss

CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "tanh": nn.RNNCell, "relu": nn.RNNCell}


def make_cell(kind, inputs, hidden, bias=True):
    options = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
    return CELLS[kind](inputs, hidden, bias, **options).double()


class Unrolled(nn.Module):
    """A cell over a sequence ``[samples, positions, inputs]``, or ``[positions, inputs]`` without a batch."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x, state):
        outputs = []
        for t in range(x.shape[-2]):
            state = self.cell(x[..., t, :], state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, -2)


class Explicit(nn.Module):
    """The same cell from two linear layers, by the formulas of its documentation."""

    def __init__(self, kind, cell):
        super().__init__()
        self.kind, self.size = kind, cell.hidden_size
        for part, short in (("input", "ih"), ("hidden", "hh")):
            weight = getattr(cell, f"weight_{short}")
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=cell.bias)
            for name, _ in list(layer.named_parameters()):
                own = getattr(cell, f"{name}_{short}")
                setattr(layer, name, nn.Parameter(own.detach().clone(), own.requires_grad))
            setattr(self, part, layer)

    def forward(self, x, state):
        if state is None:
            zeros = x.new_zeros(*x.shape[:-1], self.size)
            state = (zeros, zeros) if self.kind == "lstm" else zeros
        h = state[0] if self.kind == "lstm" else state
        a, b = self.input(x), self.hidden(h)
        if self.kind == "lstm":
            i, f, g, o = (a + b).chunk(4, -1)
            c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c
        if self.kind == "gru":
            (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
            z = torch.sigmoid(az + bz)
            return (1 - z) * torch.tanh(an + torch.sigmoid(ar + br) * bn) + z * h
        return getattr(torch, self.kind)(a + b)


def matrices(cell):
    """The trained gradients of each projection as [1, o, i]."""
    result = {}
    for part, short in (("input", "ih"), ("hidden", "hh")):
        own = [getattr(cell, f"{name}_{short}") for name in ("weight", "bias")[: 1 + cell.bias]]
        trained = [parameter.grad.reshape(len(parameter), -1) for parameter in own if parameter.requires_grad]
        if trained:
            result[part] = torch.cat(trained, 1)[None].clone()
    return result


@st.composite
def cells(draw):
    kind, bias = draw(st.sampled_from(list(CELLS))), draw(st.booleans())
    cell = make_cell(kind, draw(st.integers(1, 3)), draw(st.integers(1, 3)), bias)
    names = [name for name, _ in cell.named_parameters()]
    for name in draw(st.sampled_from([[], [], [], *([name] for name in names)])):
        cell.get_parameter(name).requires_grad_(False)
    lead = draw(st.sampled_from([(), (1,), (3,)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(*lead, draw(st.integers(1, 3)), cell.input_size).double()
    state = None
    if draw(st.booleans()):
        h, c = torch.randn(2, *lead, cell.hidden_size).double()
        state = (h, c) if kind == "lstm" else h
    return kind, cell, x, state


@DRAWN
@given(cells(), st.sampled_from(["expand", "reduce"]))
def test_cells(drawn, sharing):
    kind, cell, x, state = drawn
    reference, plain, model = Unrolled(Explicit(kind, cell)), copy.deepcopy(cell), Unrolled(cell)
    samples = len(x) if x.ndim == 3 else 1
    expected = Unrolled(plain)(x, state)
    (total_loss(expected, samples) / samples).backward()

    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing), damping=0.3)
    outputs = model(x, state)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-14)
    (total_loss(outputs, samples) / samples).backward()
    for left, right in zip(cell.parameters(), plain.parameters(), strict=True):
        assert left.requires_grad == (left.grad is not None)
        if left.requires_grad:
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-11, atol=1e-13)
    raw = matrices(cell)
    preconditioner.step()

    batched = (x, state) if x.ndim == 3 else (x[None], _with_batch(state))
    rows = dense.capture(reference, lambda model: total_loss(model(*batched), samples))
    rows = {name.removeprefix("cell."): seen for name, seen in rows.items()}
    solved = matrices(cell)
    for name, V in dense.KFAC(damping=0.3, sharing=sharing).step(rows, raw).items():
        torch.testing.assert_close(solved[name], V, rtol=1e-8, atol=1e-11)
    assert solved.keys() == rows.keys()


def _with_batch(state):
    if state is None:
        return None
    return tuple(part[None] for part in state) if isinstance(state, tuple) else state[None]


def test_steps_without_statistics_run_torchs_own_forward(monkeypatch):
    cell, observed = nn.GRUCell(3, 4), []
    preconditioner = natgrad.Preconditioner(cell, refresh=natgrad.Refresh(factors=3, inverses=3))
    run = CellForward.run
    monkeypatch.setattr(CellForward, "run", lambda self, *args: observed.append(step) or run(self, *args))
    for step in range(7):  # noqa: B007
        cell.zero_grad()
        cell(torch.randn(5, 3)).square().mean().backward()
        preconditioner.step()
    assert observed == [0, 3, 6]
