"""`explain()`: what was preconditioned so far, not what could be, and the summary."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad.preconditioner.explanation import collapse


class Branches(torch.nn.Module):
    """Two layers, the second of which is called on demand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 3), torch.nn.Linear(3, 3)
        self.calls_second = False

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if self.calls_second else x


def training(curvature=None):
    torch.manual_seed(0)
    model = Branches()
    refresh = natgrad.Refresh(factors=1, inverses=1)
    preconditioner = natgrad.Preconditioner(model, curvature, refresh=refresh)

    def step():
        model.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        preconditioner.step()

    return model, preconditioner, step


def test_before_the_first_step_nothing_was_preconditioned():
    _, preconditioner, _ = training()
    explanation = preconditioner.explain()
    assert (explanation.preconditioned, explanation.covered) == (0.0, 1.0)
    assert not any(row.preconditioned for row in explanation.rows)
    assert "100.0% of the parameters can be preconditioned, 0.0% have been so far" in " ".join(str(explanation).split())
    assert "0.0% have been so far" in repr(explanation)


def test_a_layer_that_was_never_called_was_not_preconditioned():
    model, preconditioner, step = training()
    step()
    rows = {row.parameter: row.preconditioned for row in preconditioner.explain().rows}
    assert rows == {"first.weight": True, "first.bias": True, "second.weight": False, "second.bias": False}
    assert preconditioner.explain().preconditioned == pytest.approx(18 / 30)
    model.calls_second = True
    step()
    assert preconditioner.explain().preconditioned == 1.0


def test_a_layer_without_a_gradient_in_this_step_was_preconditioned_before():
    model, preconditioner, step = training()
    model.calls_second = True
    step()
    model.calls_second = False
    step()
    assert preconditioner.explain().preconditioned == 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x + self.scale * self.norm(self.k(self.q(x).tanh()))


class Deep(nn.Module):
    """Repeated blocks, an excluded layer, a frozen one, and one that no layer type covers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))
        self.a_layer_with_a_name_that_is_longer_than_a_third_of_a_line = nn.Linear(6, 6)
        self.frozen, self.bilinear = nn.Linear(6, 6).requires_grad_(False), nn.Bilinear(1, 6, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.frozen(self.a_layer_with_a_name_that_is_longer_than_a_third_of_a_line(self.blocks(x)))
        return self.head(x) + self.bilinear(torch.ones(len(x), 1), x)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_summary_is_short_and_complete(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    model = Deep()
    preconditioner = natgrad.Preconditioner(model, {"head": None, "*": natgrad.KFAC()})
    explanation = preconditioner.explain()
    text, full = str(explanation), preconditioner.explain(full=True)
    assert len(text.splitlines()) <= 25
    for words in (
        "blocks.0-11.q, blocks.0-11.k and 1 more",
        "KFAC",
        "UnitWise",
        "blocks.0-11.norm",
        "moved by the optimizer alone",
        "excluded by the pattern 'head'",
        "frozen",
        "Bilinear",
        "0.0% have been so far",
        "multiplications",
        "MiB",
        "explain(full=True)",
    ):
        assert words in text, words
    for name, _ in model.named_parameters():
        assert f"{name} " in str(full), "names are not broken"
    assert full.rows == explanation.rows


def test_many_curvatures_and_reasons_are_joined():
    model = nn.ModuleDict({f"layer{n}": nn.Linear(n, 1) for n in range(2, 32)})
    curvature = {f"layer{n}": natgrad.HyLo(n / 50) for n in range(2, 12)}
    curvature |= {f"layer{n}": natgrad.HyLo(n / 50) if n % 2 else None for n in range(12, 32)}
    text = str(natgrad.Preconditioner(model, curvature).explain())
    assert len(text.splitlines()) <= 25
    assert "other curvatures" in text
    assert "other reasons" in text


def test_what_is_new_in_a_summary_after_steps():
    _, preconditioner, step = training()
    step()
    assert "Not preconditioned yet: second" in str(preconditioner.explain())


class Tied(nn.Module):
    """A class token of the model itself, and an embedding that is tied to the head."""

    def __init__(self):
        super().__init__()
        self.token, self.table = nn.Parameter(torch.ones(6)), nn.Embedding(9, 6)
        self.hidden, self.decode = nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.decode.weight = self.table.weight


@pytest.mark.parametrize("options", [{}, {"heads": ["dec*"]}])
def test_natural_muon_says_what_it_leaves_to_adamw(options):
    reasons = {row.parameter: row.reason for row in natgrad.NaturalMuon(Tied(), **options).explain().rows}
    assert reasons == {
        "token": "a parameter of the model itself, of no layer",
        "table.weight": "tied to decode, the head",
        "hidden.weight": "",
        "hidden.bias": "natural Muon moves no biases",
    }


def test_optimizers_explain_themselves_and_say_what_moves_the_rest(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    model = Deep()
    optimizer = natgrad.NaturalMuon(model, heads=["head"])
    text = str(optimizer.explain())
    assert "moved by AdamW alone" in text
    assert "natural Muon" in text
    assert "Spectral" not in text
    assert "AdamW: head, by heads=" in " ".join(str(optimizer.explain(full=True)).split())
    assert optimizer.metrics() == optimizer.preconditioner.metrics()
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    assert "nearest to the loss: head='adamw'" in str(natgrad.NaturalMuon(plain).explain())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, {"blocks.*": natgrad.KFAC()}, optimizer=sgd)
    assert "moved by SGD alone" in str(natgrad.PreconditionedOptimizer(sgd, preconditioner).explain())


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["a.0.q", "a.1.q", "a.2.k"], ["a.0-1.q", "a.2.k"]),
        (["0.0", "0.1", "1.0", "1.1", "1.2"], ["0-1.0-1", "1.2"]),
        (["x.0", "x.2", "x.3", "x.4", "y"], ["x.0,2-4", "y"]),
        (["x1.0", "x2.0"], ["x1.0", "x2.0"]),
    ],
)
def test_repeated_names_are_joined(names, joined):
    found = collapse(dict.fromkeys(names, 1))
    assert sorted(found) == sorted(joined)
    assert sum(found.values()) == len(names)
