"""K-FAC and the Fisher written out in full: slow, float64, obviously right, and knowing nothing of natgrad.

Rows come from plain hooks and torch's own convolutions, blocks are explicit Kronecker products, and every solve is
`torch.linalg.solve` on the whole matrix.

Shapes: n blocks (groups), B samples, T positions, i inputs and o outputs of a block; i counts the bias's constant 1.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.dense import norm as dense_norm

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


@dataclass(frozen=True)
class Rows:
    """What a layer saw: its input rows a [n, B, T, i] and per-sample output gradients g [n, B, T, o].

    Each channel of a norm layer is a block: a is the normalised input and 1, g the channel's output gradient. Its
    curvature is the block itself, `exact`.
    """

    a: Tensor
    g: Tensor
    exact: bool = False

    def gradient(self) -> Tensor:
        """W = (1/B) Σ_n Σ_t g aᵀ, [n, o, i]."""
        return torch.einsum("nbto,nbti->noi", self.g, self.a) / self.a.shape[1]

    def fisher(self) -> Tensor:
        """The block itself, (1/B) Σ_n vec(Σ_t g aᵀ) vec(Σ_t g aᵀ)ᵀ, [n, o i, o i]."""
        per_sample = torch.einsum("nbto,nbti->nboi", self.g, self.a).flatten(2)
        return per_sample.mT @ per_sample / self.a.shape[1]

    def factors(self, sharing: str = "expand") -> tuple[Tensor, Tensor]:
        """A [n, i, i] and G [n, o, o] of K-FAC expand or reduce."""
        B, T = self.a.shape[1:3]
        if sharing == "reduce":
            a, g = self.a.mean(2), self.g.sum(2)
            return a.mT @ a / B, g.mT @ g / B
        a, g = self.a.flatten(1, 2), self.g.flatten(1, 2)
        return a.mT @ a / B, g.mT @ g / (B * T)

    def positions(self, mask: Tensor | None = None) -> Rows:
        """Every (unmasked) position as a sample of its own, for token-mean losses; mask [B, T]."""
        keep = torch.ones(self.a.shape[1:3], dtype=torch.bool) if mask is None else mask
        return Rows(self.a[:, keep].unsqueeze(2), self.g[:, keep].unsqueeze(2), self.exact)

    @staticmethod
    def concatenate(parts: Iterable[Rows], dim: int) -> Rows:
        """Join along the samples (dim 1) or the positions (dim 2)."""
        parts = list(parts)
        return Rows(
            torch.cat([part.a for part in parts], dim), torch.cat([part.g for part in parts], dim), parts[0].exact
        )


def twin(model: nn.Module) -> nn.Module:
    """A float64 copy to compute the reference on; take it before anything hooks the model."""
    return copy.deepcopy(model).double()


def trained_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear, convolutional and norm layers with something to train, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, *CONVOLUTIONS, *dense_norm.NORMS))
        and any(p.requires_grad for p in module.parameters())
    }


def input_rows(module: nn.Module, x: Tensor, g: Tensor | None = None) -> Tensor:
    """The layer's input rows [n, B, T, i]; patches are what torch's own convolution gives for an identity kernel.

    `g` is a gradient at the output; a transposed convolution's caller may choose its size.
    """
    if isinstance(module, dense_norm.NORMS):
        rows = dense_norm.rows(module, dense_norm.normalise(module, x)).movedim(-1, 0).unsqueeze(-1)
    elif isinstance(module, nn.Linear):
        rows = x.reshape(len(x) if x.ndim > 1 else 1, -1, x.shape[-1]).unsqueeze(0)
    else:
        channels, size = module.in_channels, math.prod(module.kernel_size)
        transposed = isinstance(module, TRANSPOSED)
        reader = type(module)(
            channels, channels * size, module.kernel_size, module.stride, module.padding, dilation=module.dilation,
            bias=False, padding_mode=module.padding_mode, dtype=x.dtype,
        )  # fmt: skip
        identity = torch.eye(channels * size, dtype=x.dtype).reshape(-1, channels, *module.kernel_size)
        reader.weight.data = identity.transpose(0, 1) if transposed else identity
        batched = x if x.ndim == len(module.kernel_size) + 2 else x.unsqueeze(0)
        if transposed:
            sizes = zip(
                batched.shape[2:], module.kernel_size, module.stride, module.padding, module.dilation, strict=True
            )
            smallest = [(size - 1) * s - 2 * p + d * (k - 1) + 1 for size, k, s, p, d in sizes]
            reader.output_padding = [
                size - least for size, least in zip(g.shape[-len(smallest) :], smallest, strict=True)
            ]
        rows = reader(batched).detach().flatten(2).unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2)
    columns = [rows] if module.weight.requires_grad else []
    if _trained_bias(module):
        columns.append(torch.ones_like(rows[..., :1]))
    return torch.cat(columns, dim=-1)


def _trained_bias(module: nn.Module) -> bool:
    bias = getattr(module, "bias", None)
    return bias is not None and bias.requires_grad


def output_rows(module: nn.Module, g: Tensor) -> Tensor:
    """A gradient at the layer's output as rows [n, B, T, o]."""
    if isinstance(module, dense_norm.NORMS):
        return dense_norm.rows(module, g).movedim(-1, 0).unsqueeze(-1)
    if isinstance(module, nn.Linear):
        return g.reshape(len(g) if g.ndim > 1 else 1, -1, g.shape[-1]).unsqueeze(0)
    batched = g if g.ndim == len(module.kernel_size) + 2 else g.unsqueeze(0)
    return batched.flatten(2).unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2)


def capture(model: nn.Module, total: Callable[[nn.Module], Tensor]) -> dict[str, Rows]:
    """Run `total`, the *sum* of the per-sample losses, and return the rows of every layer it used."""
    uses: list[tuple[str, Tensor, Tensor]] = []

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: uses.append((name, inputs[0].detach(), output))

    layers = trained_layers(model)
    handles = [module.register_forward_hook(keep(name)) for name, module in layers.items()]
    try:
        loss = total(model)
    finally:
        for handle in handles:
            handle.remove()
    uses = [use for use in uses if use[2].requires_grad]
    grads = torch.autograd.grad(loss, [output for _, _, output in uses], allow_unused=True)
    rows: dict[str, list[Rows]] = defaultdict(list)
    for (name, x, _), g in zip(uses, grads, strict=True):
        if g is not None:  # else the loss does not depend on this use
            exact = isinstance(layers[name], dense_norm.NORMS)
            rows[name].append(Rows(input_rows(layers[name], x, g), output_rows(layers[name], g), exact))
    return {name: Rows.concatenate(seen, dim=2) for name, seen in rows.items()}


def to_matrix(module: nn.Module, values: Mapping[str, Tensor | None]) -> Tensor:
    """The trained ones of {"weight": ..., "bias": ...} as one matrix a block, [n, o, i]."""
    if isinstance(module, dense_norm.NORMS):
        leaves = [leaf for leaf in ("weight", "bias") if dense_norm.trained(module, leaf)]
        return torch.stack([values[leaf].reshape(-1) for leaf in leaves], -1).unsqueeze(1)
    blocks = getattr(module, "groups", 1)
    columns = []
    if module.weight.requires_grad:
        weight = values["weight"].reshape(blocks, module.weight.shape[0] // blocks, *module.weight.shape[1:])
        columns.append((weight.transpose(1, 2) if isinstance(module, TRANSPOSED) else weight).flatten(2))
    if module.bias is not None and module.bias.requires_grad:
        columns.append(values["bias"].reshape(blocks, -1, 1))
    return torch.cat(columns, dim=-1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Each layer's .grad as matrices [n, o, i], in float64; layers without gradients are left out."""
    return {
        name: to_matrix(module, {key: p.grad for key, p in module.named_parameters()}).double()
        for name, module in trained_layers(model).items()
        if all(p.grad is not None for p in module.parameters() if p.requires_grad)
    }


def solve_eigen(W: Tensor, A: Tensor, G: Tensor, damping: float) -> Tensor:
    """(G ⊗ A + γI)⁻¹ vec(W), block by block, with the Kronecker product formed."""
    solved = []
    for w, a, g in zip(W, A, G, strict=True):
        block = torch.kron(g, a) + damping * torch.eye(w.numel(), dtype=w.dtype)
        solved.append(torch.linalg.solve(block, w.reshape(-1)).reshape(w.shape))
    return torch.stack(solved)


def solve_inverse(W: Tensor, A: Tensor, G: Tensor, damping: float, pi: bool = True) -> Tensor:
    """(G + (√γ/π) I)⁻¹ W (A + π√γ I)⁻¹ with π² = (tr A / d_A)/(tr G / d_G), or γ on both without π."""
    solved = []
    for w, a, g in zip(W, A, G, strict=True):
        if pi:
            mean_a, mean_g = float(a.trace()) / len(a), float(g.trace()) / len(g)
            ratio = (mean_a / mean_g) ** 0.5 if mean_a and mean_g else 1.0
            damping_a, damping_g = ratio * damping**0.5, damping**0.5 / ratio
        else:
            damping_a = damping_g = damping
        left = g + damping_g * torch.eye(len(g), dtype=g.dtype)
        right = a + damping_a * torch.eye(len(a), dtype=a.dtype)
        solved.append(torch.linalg.solve(right, torch.linalg.solve(left, w), left=False))
    return torch.stack(solved)


def solve_block(W: Tensor, F: Tensor, damping: float) -> Tensor:
    """(F + γI)⁻¹ vec(W), block by block."""
    damped = F + damping * torch.eye(F.shape[-1], dtype=F.dtype)
    return torch.linalg.solve(damped, W.flatten(1)[..., None])[..., 0].view_as(W)


def kept(factor: Tensor, most: float) -> Tensor:
    """What a side keeps of a factor [n, d, d], as a dense matrix: the diagonal where it is too wide."""
    return factor if factor.shape[-1] <= most else factor * torch.eye(factor.shape[-1])


def kl_scale(raw: Mapping[str, Tensor], solved: Mapping[str, Tensor], rates: Mapping[str, float], clip: float) -> float:
    """ν = min(1, √(κ / Σ lr²|⟨V, ∇⟩|)) over the layers."""
    total = sum(rates[name] ** 2 * abs(float((solved[name] * raw[name]).sum())) for name in solved)
    return min(1.0, (clip / total) ** 0.5) if total else 1.0


class KFAC:
    """K-FAC over many steps: running averages with bias correction, stale factors and stale inverses."""

    def __init__(
        self,
        *,
        damping: float | Callable[[int], float],
        form: str = "eigen",
        sharing: str = "expand",
        sides: str = "both",
        pi: bool = True,
        factor_decay: float = 0.95,
        factors: int | Callable[[int], int] = 1,
        inverses: int | Callable[[int], int] = 1,
        max_factor_size: int | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """Take the options of `natgrad.KFAC`; "iterative" is "eigen" where its tolerance is small."""
        self.form, self.sharing, self.sides, self.pi, self.factor_decay = form, sharing, sides, pi, factor_decay
        self.max_factor_size = math.inf if max_factor_size is None else max_factor_size
        self.damping, self.factors, self.inverses = map(_schedule, (damping, factors, inverses))
        self.completed = 0
        self.last = {"factors": None, "inverses": None}
        self.sums: dict[str, tuple[Tensor, ...]] = {}  # A and G, or F of a norm layer
        self.updates: dict[str, int] = defaultdict(int)
        self.held: dict[str, tuple[tuple[Tensor, ...], float]] = {}
        self.exact: set[str] = set()

    def statistics(self, seen: Rows) -> tuple[Tensor, ...]:
        """What a batch adds to the running averages: A and G as they are kept, or A alone."""
        factors = tuple(kept(factor, self.max_factor_size) for factor in seen.factors(self.sharing))
        return factors[:1] if self.sides == "a" else factors

    def solve(self, W: Tensor, averages: tuple[Tensor, ...], damping: float, renewed: float) -> Tensor:
        """The preconditioned gradient, by the present damping or by that of the last decomposition."""
        if self.sides == "a":
            A = averages[0] + (renewed if self.form == "inverse" else damping) * torch.eye(W.shape[-1], dtype=W.dtype)
            return torch.linalg.solve(A, W, left=False)
        if self.form == "inverse":
            return solve_inverse(W, *averages, renewed, self.pi)
        return solve_eigen(W, *averages, damping)

    def step(self, rows: Mapping[str, Rows], raw: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Fold the rows of this step's batch, then precondition `raw` (default: the rows' own gradient)."""
        raw = {name: seen.gradient() for name, seen in rows.items()} if raw is None else raw
        if self._due("factors"):
            for name, seen in rows.items():
                self.exact |= {name} if seen.exact else set()
                self._fold(name, (seen.fisher(),) if seen.exact else self.statistics(seen))
        damping = self.damping(self.completed)
        if self._due("inverses"):
            for name, sums in self.sums.items():
                correction = 1 - self._decay(name) ** self.updates[name]
                self.held[name] = (tuple(total / correction for total in sums), damping)
        self.completed += 1
        return {name: self._solve(name, W, damping) for name, W in raw.items()}

    def _fold(self, name: str, fresh: tuple[Tensor, ...]) -> None:
        d = self._decay(name)
        old = self.sums.get(name, tuple(torch.zeros_like(factor) for factor in fresh))
        self.sums[name] = tuple(d * o + (1 - d) * f for o, f in zip(old, fresh, strict=True))
        self.updates[name] += 1

    def _solve(self, name: str, W: Tensor, damping: float) -> Tensor:
        averages, renewed = self.held[name]
        if name in self.exact:
            return solve_block(W, *averages, damping)
        return self.solve(W, averages, damping, renewed)

    def _decay(self, name: str) -> float:
        return self.factor_decay

    def _due(self, clock: str) -> bool:
        last, interval = self.last[clock], getattr(self, clock)(self.completed)
        due = last is None or self.completed - last >= interval
        if due:
            self.last[clock] = self.completed
        return due


class RankOne(KFAC):
    """Running averages of ā and ḡ, and (ḡḡᵀ ⊗ āāᵀ + γI)⁻¹."""

    def statistics(self, seen: Rows) -> tuple[Tensor, Tensor]:
        g = seen.g.sum(2).mean(1) if self.sharing == "reduce" else seen.g.mean((1, 2))
        return seen.a.mean((1, 2)), g

    def solve(self, W: Tensor, averages: tuple[Tensor, ...], damping: float, renewed: float) -> Tensor:
        A, G = (mean[:, :, None] * mean[:, None, :] for mean in averages)
        return solve_eigen(W, A, G, damping)


class SNGD(KFAC):
    """(F + αI)⁻¹ with the block of the last refresh's rows, pooled over positions, and the damping of then."""

    def statistics(self, seen: Rows) -> tuple[Tensor]:
        return (Rows(seen.a.mean(2, keepdim=True), seen.g.sum(2, keepdim=True)).fisher(),)

    def solve(self, W: Tensor, averages: tuple[Tensor, ...], damping: float, renewed: float) -> Tensor:
        return solve_block(W, *averages, renewed)

    def _decay(self, name: str) -> float:
        return self.factor_decay if name in self.exact else 0.0


def _schedule(value: float | Callable[[int], float]) -> Callable[[int], float]:
    return value if callable(value) else lambda step: value


def loss_hessian(likelihood: str, outputs: Tensor, coefficient: float = 1.0) -> Tensor:
    """The per-sample Fisher of the predictive distribution over the outputs [S, K]: [S, K, K].

    Categorical: diag(p) - ppᵀ. Bernoulli: c diag(p(1-p)). Gaussian, from c‖f - y‖²: 2c I.
    """
    if likelihood == "categorical":
        p = outputs.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    if likelihood == "bernoulli":
        p = outputs.sigmoid()
        return coefficient * torch.diag_embed(p * (1 - p))
    return 2 * coefficient * torch.diag_embed(torch.ones_like(outputs))


def exact_rows(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], likelihood: str, coefficient: float = 1.0
) -> list[dict[str, Rows]]:
    """Rows whose outer products add up to the exact Fisher's: one capture for each column of a root of the Hessian.

    `forward` returns the outputs as [B, K], or [B, T, K] where the positions are drawn independently.
    """

    def positions(model: nn.Module) -> Tensor:
        outputs = forward(model)
        return outputs.reshape(len(outputs), -1, outputs.shape[-1])

    outputs = positions(model).detach()
    values, vectors = torch.linalg.eigh(loss_hessian(likelihood, outputs.flatten(0, 1), coefficient))
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).reshape(*outputs.shape, -1)  # [B, T, K, K]
    captures = []
    for t in range(outputs.shape[1]):
        for k in range(outputs.shape[2]):
            direction = torch.zeros_like(outputs)
            direction[:, t] = root[:, t, :, k]
            captures.append(capture(model, lambda model, d=direction: (positions(model) * d).sum()))
    return captures


def exact_factors(captures: list[dict[str, Rows]], name: str, sharing: str = "expand") -> tuple[Tensor, Tensor]:
    """A and the exact G of one layer, from `exact_rows`."""
    pairs = [rows[name].factors(sharing) for rows in captures]
    return pairs[0][0], sum(G for _, G in pairs)


def exact_fisher(
    model: nn.Module, name: str, forward: Callable[[nn.Module], Tensor], likelihood: str, coefficient: float = 1.0
) -> Tensor:
    """The exact Fisher block of one layer by its explicit Jacobian, [n, o i, o i]; `forward` as in `exact_rows`."""
    module = model.get_submodule(name)
    parameters = {f"{name}.{key}": p.detach() for key, p in module.named_parameters() if p.requires_grad}

    def outputs_of(parameters: dict[str, Tensor]) -> Tensor:
        return forward(lambda *args: torch.func.functional_call(model, parameters, args))

    outputs = outputs_of(parameters).detach()
    jacobians = torch.func.jacrev(outputs_of)(parameters)
    lead = outputs.shape
    flat = {
        key.removeprefix(f"{name}."): jacobian.reshape(lead.numel(), *jacobian.shape[len(lead) :])
        for key, jacobian in jacobians.items()
    }
    matrices = torch.stack([to_matrix(module, {key: j[row] for key, j in flat.items()}) for row in range(lead.numel())])
    J = matrices.flatten(2).reshape(lead[:-1].numel(), lead[-1], *matrices.shape[1:2], -1)  # [B T, K, n, o i]
    H = loss_hessian(likelihood, outputs.flatten(0, -2), coefficient)
    return torch.einsum("sknp,skl,slnq->npq", J, H, J).detach() / lead[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖."""
    return float((actual.double() - expected).norm() / expected.norm())


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-9) -> None:
    """Every layer's matrix agrees to a relative error."""
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert all(error <= tolerance for error in errors.values()), errors
