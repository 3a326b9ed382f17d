"""EKFAC written out in full: the explicit Fisher of per-sample gradients, and its diagonal in a basis of K-FAC's.

An eigenbasis is not unique, least of all where factors are singular; it is read off the preconditioner, and checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tests.dense import reference as dense
from tests.dense.reference import Rows, solve_block
from tests.device import here


def fisher(uses: Rows | Iterable[Rows], sharing: str = "expand") -> Tensor:
    """(1/B) Σ_n vec(∇_n) vec(∇_n)ᵀ, [n, o i, o i], of each use by itself; with reduce ∇_n = (Σ_t g)(mean_t a)ᵀ."""
    uses = [uses] if isinstance(uses, Rows) else list(uses)
    if sharing == "reduce":
        uses = [Rows(use.a.mean(2, keepdim=True), use.g.sum(2, keepdim=True)) for use in uses]
    return sum(use.fisher() for use in uses)


def rotation(QA: Tensor, QG: Tensor) -> Tensor:
    """Q = Q_G ⊗ Q_A, [n, o i, o i]."""
    return torch.stack([torch.kron(g, a) for g, a in zip(QG, QA, strict=True)])


def moments(F: Tensor, QA: Tensor, QG: Tensor) -> Tensor:
    """S = diag(Qᵀ F Q), [n, o i]."""
    Q = rotation(QA, QG)
    return (Q.mT @ F @ Q).diagonal(dim1=-2, dim2=-1)


def approximation(S: Tensor, QA: Tensor, QG: Tensor) -> Tensor:
    """Q diag(S) Qᵀ, [n, o i, o i]."""
    Q = rotation(QA, QG)
    return (Q * S[:, None, :]) @ Q.mT


def blocks(preconditioner, module: str) -> dict[str, Tensor]:
    """What a preconditioner keeps of a module's layer."""
    (own,) = (
        own
        for key, own in here(preconditioner.state_dict()["blocks"]).items()
        if key.rpartition(".")[0] == module or key == module
    )
    return own


def assert_basis(Q: Tensor, factor: Tensor, tolerance: float = 1e-9) -> None:
    """Q is orthogonal, and makes a factor diagonal."""
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype).expand_as(Q)
    torch.testing.assert_close(Q.mT @ Q, eye, rtol=0, atol=tolerance)
    rotated = Q.mT @ factor @ Q
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    assert float(off.norm()) <= tolerance * (float(factor.norm()) or 1.0)


class EKFAC:
    """Over many steps: every capture is remembered, and averages are sums with their weights written out."""

    def __init__(self, *, damping=0.3, sharing="expand", factor_decay=0.95, factors=1, inverses=10) -> None:
        self.damping, self.sharing, self.factor_decay = damping, sharing, factor_decay
        self.intervals, self.last, self.completed = {"factors": factors, "inverses": inverses}, {}, 0
        self.factors: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.moments: dict[str, list[Tensor]] = defaultdict(list)
        self.made: dict[str, tuple[Tensor, ...]] = {}
        options = {"factor_decay": factor_decay, "factors": factors, "inverses": inverses}
        self.norms = dense.KFAC(damping=damping, **options)

    def step(self, rows: Mapping[str, Rows], preconditioner, raw: Mapping[str, Tensor] | None = None):
        """Follow a step that the preconditioner has made; `rows` may hold lists of uses."""
        if raw is None:
            raw = {name: sum(use.gradient() for use in _uses(seen)) for name, seen in rows.items()}
        exact = {name: seen for name, seen in rows.items() if isinstance(seen, Rows) and seen.exact}
        norms = self.norms.step(exact, {name: raw[name] for name in exact})
        rows = {name: seen for name, seen in rows.items() if name not in exact}
        if self._due("factors"):
            for name, seen in rows.items():
                joined = seen if isinstance(seen, Rows) else Rows.concatenate(seen, 2)
                self.factors[name].append(joined.factors(self.sharing))
                if name in self.made:
                    self.moments[name].append(moments(fisher(seen, self.sharing), *self.made[name][:2]))
        if self._due("inverses"):
            for name, pairs in self.factors.items():
                A, G = (self._average([pair[side] for pair in pairs]) for side in (0, 1))
                own = blocks(preconditioner, name)
                assert_basis(own["QA"], A)
                assert_basis(own["QG"], G)
                self.made[name] = own["QA"], own["QG"], A, G
                self.moments[name].clear()
        self.completed += 1
        matrices = {name: W for name, W in raw.items() if name not in exact}
        return norms | {name: solve_block(W, self.fisher(name), self.damping) for name, W in matrices.items()}

    def fisher(self, name: str) -> Tensor:
        """EKFAC's block, or K-FAC's as long as nothing was measured in its basis."""
        QA, QG, A, G = self.made[name]
        if not self.moments[name]:
            return torch.stack([torch.kron(g, a) for g, a in zip(G, A, strict=True)])
        return approximation(self._average(self.moments[name]), QA, QG)

    def _average(self, values: list[Tensor]) -> Tensor:
        weights = [self.factor_decay ** (len(values) - 1 - index) for index in range(len(values))]
        return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)

    def _due(self, clock: str) -> bool:
        due = clock not in self.last or self.completed - self.last[clock] >= self.intervals[clock]
        if due:
            self.last[clock] = self.completed
        return due


def _uses(seen: Rows | Iterable[Rows]) -> list[Rows]:
    return [seen] if isinstance(seen, Rows) else list(seen)


def assert_equal(actual, expected, tolerance: float = 1e-8) -> None:
    """See `dense.assert_equal`."""
    dense.assert_equal(actual, expected, tolerance)
