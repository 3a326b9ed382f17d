"""`Curvature.fisher_product` is the Fisher block that `precondition` inverts: (F + γI)⁻¹ (F D + γ D) is D again."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.state.parameters import stacked
from tests.dense import reference as dense
from tests.every import EVERY

EXACT = {
    **{name: make for name, make in EVERY.items() if name.startswith(("kfac eigen", "kfac red", "kfac bl", "kfac it"))},
    **{
        name: EVERY[name] for name in ("ekfac", "rank one", "sngd", "hylo kis", "hylo whole", "hylo kid", "hylo switch")
    },
    "kfac diagonal": partial(natgrad.KFAC, max_factor_size=3),
    "ekfac blocks": partial(natgrad.EKFAC, max_factor_size=4, wide="blocks"),
    "foof": partial(natgrad.KFAC, sides="a"),
    "foof inverse": partial(natgrad.KFAC, sides="a", form="inverse"),
}
INVERSE = [
    {"form": "inverse"},
    {"form": "inverse", "max_factor_size": 4, "wide": "blocks"},
    {"form": "inverse", "max_factor_size": 4},
    {"form": "newton-schulz", "tolerance": 1e-9, "iterations": 100},
]
EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)
DAMPING = 0.3


class Net(nn.Module):
    """An embedding that is the head too, a grouped convolution, a linear layer and two norms."""

    def __init__(self, *, table: bool):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4) if table else nn.Linear(4, 4)
        self.norm, self.plain = nn.LayerNorm(4), nn.RMSNorm(4)
        self.convolution, self.linear = nn.Conv1d(4, 4, 2, groups=2), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if table:
            self.head.weight = self.table.weight

    def forward(self, x):
        z = self.norm(self.table(x)).tanh()
        return self.head(self.plain(self.linear(self.convolution(z.mT).mT)).mean(1))


def trained(curvature, *, table, norms=None, steps=2, epochs=False):
    model = Net(table=table).double()
    chosen = curvature if norms is None else {"norm": norms, "plain": norms, "*": curvature}
    preconditioner = natgrad.Preconditioner(model, chosen, damping=DAMPING, refresh=EVERY_STEP)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        y = torch.randint(7, (6,), generator=generator)
        x = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64)
        x = torch.randint(7, (6, 5), generator=generator) if table else x
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        preconditioner.step()
        if epochs:
            preconditioner.next_epoch()
    return model, preconditioner


def check(preconditioner, tolerance=1e-9):
    stacks = preconditioner.parts.groups
    for stack in stacks:
        D = stacked(stack, lambda slot: slot.parameter)
        back = stack.solve(stack.members, stack.fisher_product(D) + DAMPING * stack.factor * D, DAMPING)
        dense.assert_equal({repr(stack.curvature): back}, {repr(stack.curvature): D}, tolerance)
    return stacks


@pytest.mark.parametrize("name", EXACT)
def test_it_undoes_the_solve(name):
    # The two norm layers have a product of their own ("unit"), with and without a bias.
    _, preconditioner = trained(EXACT[name](), table=False)
    assert len(check(preconditioner)) >= 4


@pytest.mark.parametrize("name", ["kfac eigen", "ekfac", "kfac diagonal"])
def test_tables(name):
    _, preconditioner = trained(EXACT[name](), table=True)
    check(preconditioner)


@pytest.mark.parametrize("form", ["full", "unit", "diag"])
def test_norm_layers(form):
    _, preconditioner = trained(natgrad.KFAC(), table=False, norms=natgrad.UnitWise(form=form))
    check(preconditioner)


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("options", INVERSE)
def test_inverse_forms_multiply_by_their_factors(options, table):
    """Their inverses have other damping than γI: the reference is the same curvature in its eigen form."""
    _, preconditioner = trained(natgrad.KFAC(**options), table=table)
    same = {name: value for name, value in options.items() if name in ("max_factor_size", "wide")}
    _, other = trained(natgrad.KFAC(**same), table=table)
    for one, two in zip(preconditioner.parts.groups, other.parts.groups, strict=True):
        D = stacked(one, lambda slot: slot.parameter)
        dense.assert_equal(
            {repr(one.curvature): one.fisher_product(D)}, {repr(one.curvature): two.fisher_product(D)}, 1e-9
        )


def test_it_is_the_dense_fisher_block():
    """Of one linear layer with one sample K-FAC is exact."""
    model = nn.Linear(3, 2).double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(form="inverse"))
    x = torch.randn(1, 3, dtype=torch.float64)
    model(x).pow(2).sum().backward()
    u = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1).flatten()
    preconditioner.step()
    (stack,) = preconditioner.parts.groups
    D = torch.randn(1, 2, 4, dtype=torch.float64)
    dense.assert_equal({"FD": stack.fisher_product(D).flatten()}, {"FD": u * (u @ D.flatten())})


def test_layers_without_curvature_have_none():
    _, preconditioner = trained(natgrad.KFAC(), table=False)
    stack = preconditioner.parts.groups[0]
    stack.record_results("A", 0, [False] * stack.size, forget=True)
    assert not stack.fisher_product(stacked(stack, lambda slot: slot.parameter)).any()
    assert natgrad.KBFGS().fisher_product_reads is None


def test_kid_of_all_rows_is_the_product_with_all_of_them():
    _, preconditioner = trained(EXACT["hylo whole"](), table=False)
    _, exact = trained(natgrad.SNGD(), table=False)
    for one, two in zip(check(preconditioner), exact.parts.groups, strict=True):
        D = stacked(one, lambda slot: slot.parameter)
        dense.assert_equal(
            {repr(one.curvature): one.fisher_product(D)}, {repr(one.curvature): two.fisher_product(D)}, 1e-9
        )


def test_a_switch_goes_on_with_drawn_rows():
    """They have no links, and the next critical epoch has them again."""
    _, preconditioner = trained(natgrad.HyLo(threshold=1e9), table=False, epochs=True, steps=5)
    assert not preconditioner.metrics()["kid"]
    check(preconditioner)
    rows = [stack for stack in preconditioner.parts.groups if stack.gathered]
    for stack in rows:
        links = stack.results["Y"]
        assert torch.equal(links[0], torch.eye(stack.rows, dtype=links.dtype) / DAMPING)
