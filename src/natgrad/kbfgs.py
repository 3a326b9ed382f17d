"""K-BFGS and K-BFGS(L): quasi-Newton inverses of Kronecker factors (Goldfarb, Ren & Bahamou 2020, arXiv 2006.08877).

Shapes: a layer has n blocks ``[o, i]``, inverses H ``[n, d, d]``, pairs s and y ``[n, d]``, a memory of p pairs
``[n, p, d]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from natgrad import linalg
from natgrad.capture.capture import viewed
from natgrad.capture.forward import count_samples
from natgrad.capture.restoring import RandomState, restored
from natgrad.errors import NatgradError, require, with_suggestions
from natgrad.layers import Handle, Layer, first_argument, layers_for, remove_all
from natgrad.linalg import triangle
from natgrad.linalg.device import accelerators, full_products
from natgrad.preconditioner.arguments import check_unscripted
from natgrad.schedule import check_number, check_whole, is_number

# μ1 of the double damping.
_MU = 0.2
# Bounds on the rounding error of Σ g relative to Σ|g|, in float32 or wider and in narrower dtypes. Measured: 1e-8 in
# float32, up to 2e-4 in bfloat16.
_ROUNDING, _ROUNDING_NARROW = 1e-4, 1e-3


class KBFGS(torch.optim.Optimizer):
    """Moves linear layers and convolutions along ``H_G Ŵ H_A``, where Ŵ is a running average of the gradient W.

    ``H_A`` starts as the inverse of ``A_LM = Ā + √γ I``, where Ā is the running average of a aᵀ, and each step updates
    it by BFGS with ``s = H_A mean(a)``, ``y = A_LM s``. ``H_G`` starts as I and is updated with running averages s of
    ``mean(z⁺) - mean(z)`` and y of ``mean(g⁺) - mean(g)``, with double damping. z are the layer's outputs and g their
    gradients; z⁺ and g⁺ belong to the same batch after the step. Means are over samples and positions. Where mean(g) is
    zero up to rounding, as before a batch norm, H_G does not change.

    All other parameters are moved as by ``torch.optim.SGD`` with this momentum as its dampening too.

    It is a baseline for one process, in float32 or float64. The loss is a mean over samples.

    Examples:
        >>> optimizer = natgrad.KBFGS(model, lr=0.1)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(inputs), targets)
        ...     loss.backward()
        ...     return loss
        >>> optimizer.step(closure)
    """

    @with_suggestions
    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.9,
        damping: float = 0.1,
        memory: int | None = None,
        factor_decay: float = 0.9,
        pair_decay: float = 0.9,
        max_factor_size: int | None = 8192,
    ) -> None:
        """Find the layers of `model`.

        Args:
            model: The model.
            lr: The learning rate.
            momentum: The weight of the old value in Ŵ, which is bias-corrected.
            damping: γ, in (0, 1).
            memory: The number of pairs that represent H_G (100 in the paper's K-BFGS(L)). None: H_G is a matrix.
            factor_decay: The weight of the old value in Ā, which is bias-corrected.
            pair_decay: The weight of the old value in s and y.
            max_factor_size: The largest number of inputs (with the bias's constant 1) and, without `memory`, of outputs
                of a layer. None: any number.

        Raises:
            ValueError: if an argument is not allowed, if there are several ranks, if a parameter is narrower than
                float32, or if no layer is trained.
        """
        require(isinstance(model, nn.Module), "model", type(model).__name__, "an nn.Module")
        check_unscripted(model)
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        require(ranks == 1, "ranks", ranks, "1: KBFGS is an optimizer for one process")
        check_number("lr", lr, "a number >= 0", minimum=0)
        for name, decay in (("momentum", momentum), ("factor_decay", factor_decay), ("pair_decay", pair_decay)):
            require(is_number(decay) and 0 <= decay < 1, name, decay, "a number in [0, 1)")
        require(is_number(damping) and 0 < damping < 1, "damping", damping, "a number in (0, 1)")
        check_whole("memory", memory, 1, 10_000, optional=True)
        check_whole("max_factor_size", max_factor_size, 1, optional=True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        narrow = [str(p.dtype) for p in trained if p.dtype not in (torch.float32, torch.float64)]
        require(not narrow, "model", narrow[:1], "of float32 or float64 parameters; use autocast for narrower products")
        self._model = model
        self._layers = {layer.slots[0].parameter: layer for layer in _layers(model, memory, max_factor_size)}
        allowed = f"one with a trained nn.Linear or convolution, within max_factor_size={max_factor_size}"
        require(self._layers, "model", type(model).__name__, allowed)
        options = {"momentum": momentum, "damping": damping, "factor_decay": factor_decay, "pair_decay": pair_decay}
        super().__init__(trained, {"lr": float(lr), **options, "memory": memory})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Evaluate the batch, move the parameters, and evaluate it again with the same random numbers.

        ``.grad``, buffers and training modes are afterwards those of the first evaluation.

        Args:
            closure: Clears the gradients, runs forward and backward passes, and returns the loss.

        Returns:
            What the first call of `closure` returned.

        Raises:
            ValueError: if `closure` is not callable.
            NatgradError: if the closure does not call the model with tensors whose first dimension are samples, or if
                its second call uses another batch.
        """
        require(callable(closure), "closure", closure, "a function that computes the gradients and returns the loss")
        random_state = RandomState(accelerators(self._model))
        loss, before = self._evaluate(closure)
        within = {slot.parameter for layer in self._layers.values() for slot in layer.slots}
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for parameter, group in pairs:
            if parameter in before:
                self._move_layer(parameter, group, before[parameter])
            elif parameter not in within and parameter.grad is not None:
                buffer = self.state[parameter].setdefault("momentum_buffer", parameter.grad.clone())
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(buffer, alpha=-group["lr"])
        random_state.restore()
        with restored(self._model):
            _, after = self._evaluate(closure)
        if [means["rows"] for means in before.values()] != [means["rows"] for means in after.values()]:
            raise NatgradError("the second call of the closure has used another batch than the first", "closure")
        for parameter, group in pairs:
            if parameter in before:
                self._update_outputs(self.state[parameter], group, before[parameter], after[parameter])
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> tuple[Any, dict[nn.Parameter, dict[str, Any]]]:
        """Call the closure, and return the loss and the means of each layer by its weight.

        The means are "A" of a aᵀ, "a", "g", whether g "is_significant", and the mean outputs "z" without a frozen bias,
        which cancels in the difference of two evaluations.
        """
        sums = {weight: _Sums(layer) for weight, layer in self._layers.items()}
        samples, handles = list[int](), list[Handle]()

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                samples.append(count_samples(args, kwargs))

        try:
            handles.append(self._model.register_forward_pre_hook(begin, with_kwargs=True))
            for weight, layer in self._layers.items():
                observe = partial(_observe, layer, sums[weight])
                handles.append(layer.module.register_forward_hook(observe, with_kwargs=True, prepend=True))
            with torch.enable_grad():
                loss = closure()
        finally:
            remove_all(handles)
        if not samples or min(samples) < 1:
            raise NatgradError(
                "the closure is to call the model with tensors whose first dimension are samples", "closure"
            )
        found = {}
        for weight, layer in self._layers.items():
            if weight.grad is None:
                continue
            if not sums[weight].rows:
                raise NatgradError(
                    f"{layer.name} has a gradient, but the closure has not called it (in eager mode)", "closure"
                )
            with full_products(weight.device):
                found[weight] = sums[weight].means(sum(samples))
                found[weight]["z"] = multiply(_blocks(layer, weight), found[weight]["a"])
        return loss, found

    def _move_layer(self, weight: nn.Parameter, group: Mapping[str, Any], means: Mapping[str, Tensor]) -> None:
        """Update Ā, Ŵ and H_A, and move the parameters of a layer."""
        layer, state, memory = self._layers[weight], self.state[weight], group["memory"]
        W = _blocks(layer, weight, gradients=True)
        if not state:
            state.update(A=torch.zeros_like(means["A"]), A_weight=0.0, W=torch.zeros_like(W), W_weight=0.0)
            state["s"], state["y"] = W.new_zeros(2, *W.shape[:2])
            if memory is None:
                state["H_G"] = torch.eye(W.shape[1]).to(W).repeat(len(W), 1, 1)
            else:
                state["S"], state["Y"] = W.new_zeros(2, len(W), memory, W.shape[1])
        for name, fresh, decay in (("A", means["A"], group["factor_decay"]), ("W", W, group["momentum"])):
            state[name].lerp_(fresh, 1 - decay)
            state[f"{name}_weight"] = decay * state[f"{name}_weight"] + 1 - decay
        with full_products(weight.device):
            A, shift = state["A"] / state["A_weight"], group["damping"] ** 0.5
            state["H_A"] = update_inputs(A, means["a"], shift, state.get("H_A"))
            right = state["W"] / state["W_weight"] @ state["H_A"]
            V = state["H_G"] @ right if memory is None else Compact(state["S"], state["Y"]).multiply(right)
        for slot in layer.slots:
            parameter, direction = layer.align(slot, slot.parameter, V[:, :, slot.columns])
            parameter.sub_(group["lr"] * direction)

    def _update_outputs(
        self, state: dict[str, Any], group: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> None:
        """Update the pair and H_G of a layer."""
        is_significant = (before["is_significant"] & after["is_significant"])[:, None]
        changes = {"s": after["z"] - before["z"], "y": after["g"] - before["g"]}
        pair = {name: torch.lerp(change, state[name], group["pair_decay"]) for name, change in changes.items()}
        pair = {name: torch.where(is_significant, average, 0) for name, average in pair.items()}
        is_finite = _finite(*pair.values())[:, None]
        for name, average in pair.items():
            state[name] = torch.where(is_finite, average, state[name])
        with full_products(pair["s"].device):
            state.update(update_outputs(state, **pair, mu=group["damping"] ** 0.5))


def _layers(model: nn.Module, memory: int | None, most: int | None) -> list[Layer]:
    """Return the trained linear layers and convolutions, without tied ones and those wider than `most`."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    hidden = {id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    found: list[Layer] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and id(module) not in hidden:
            layers = layers_for(name, module)
            found += [] if isinstance(layers, str) else layers
    return [
        layer
        for layer in found
        if layer.weight
        and all(uses[id(slot.parameter)] == 1 for slot in layer.slots)
        and (most is None or max(layer.inputs, layer.outputs if memory is None else 0) <= most)
    ]


class _Sums:
    """The sums over the rows of a layer in one evaluation of the closure."""

    def __init__(self, layer: Layer) -> None:
        like, (n, o, i) = layer.slots[0].parameter, (layer.blocks, layer.outputs, layer.inputs)
        self.rows = 0
        self._A, self._a, self._g = like.new_zeros(n, i, i), like.new_zeros(n, i), like.new_zeros(n, o)
        self._rounding = like.new_zeros(n)

    def add(self, layer: Layer, inputs: Tensor, gradients: Tensor) -> None:
        """Add one use of the layer."""
        a, g = layer.rows(inputs, gradients, layer.samples(inputs))
        a.add_gram_(self._A)
        self._a += a.pool().sum(1)
        self._g += g.pool().sum(1)
        bound = _ROUNDING_NARROW if gradients.dtype.itemsize < 4 else _ROUNDING
        self._rounding += bound * torch.linalg.vector_norm(g.dense(), 1, dim=(1, 2, 3), dtype=self._g.dtype)
        self.rows += a.samples * a.positions

    def means(self, samples: int) -> dict[str, Any]:
        """Return the means over rows, with gradients of per-sample losses for a batch of so many `samples`."""
        return {
            "A": triangle.mirror_(self._A) / self.rows,
            "a": self._a / self.rows,
            "g": self._g * (samples / self.rows),
            "is_significant": self._g.abs().sum(1) > self._rounding,
            "rows": self.rows,
        }


def _observe(
    layer: Layer, sums: _Sums, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> None:
    """Add a use of a layer to its sums when the gradient of its output arrives, as a forward hook."""
    inputs, shape = first_argument(args, kwargs).detach(), output.shape

    def take(gradient: Tensor) -> None:
        if not torch.is_grad_enabled():  # otherwise a derivative inside the model, not of the loss
            with full_products(gradient.device):
                sums.add(layer, inputs, gradient.reshape(shape))

    if output.requires_grad:
        viewed(output).register_hook(take)


def _blocks(layer: Layer, weight: Tensor, *, gradients: bool = False) -> Tensor:
    """Return the parameters of a layer, or their gradients, as blocks ``[n, o, i]``."""
    blocks = weight.new_zeros(layer.blocks, layer.outputs, layer.inputs)
    for slot in layer.slots:
        tensor = slot.parameter.grad if gradients else slot.parameter
        if tensor is not None:
            values, place = layer.align(slot, tensor.detach(), blocks[:, :, slot.columns])
            place.copy_(values)
    return blocks


def update_inputs(A: Tensor, a: Tensor, shift: float, H: Tensor | None) -> Tensor:
    """Return the new H_A for Ā, mean(a) and √γ; from its start if `H` is None or has become indefinite."""
    start = A.new_full((len(A),), shift)
    if H is None:
        return linalg.damped_inverse(A, start)[0]
    s = multiply(H, a)
    lost = ~(inner(a, s) >= 0)  # or not finite
    H = bfgs(H, s, multiply(A, s) + shift * s)
    if bool(lost.any()):
        H[lost] = linalg.damped_inverse(A[lost], start[lost])[0]
    return H


def update_outputs(known: Mapping[str, Tensor], s: Tensor, y: Tensor, mu: float) -> dict[str, Tensor]:
    """Return "H_G", or its pairs "S" and "Y", updated by a pair.

    They begin anew if H_G has become indefinite, and stay where the pair has no curvature or is not finite.
    """
    H = known.get("H_G")
    Hy = Compact(known["S"], known["Y"]).multiply(y[:, :, None])[:, :, 0] if H is None else multiply(H, y)
    lost = ~(inner(y, Hy) >= 0)
    s, y = damped(s, y, torch.where(lost[:, None], y, Hy), mu)
    if H is None:
        kept = {name: torch.where(lost[:, None, None], 0, known[name]) for name in ("S", "Y")}
        # The oldest pair gives way to this one.
        fresh = {name: torch.cat([kept[name][:, 1:], pair[:, None]], 1) for name, pair in (("S", s), ("Y", y))}
    else:
        unit = torch.eye(H.shape[-1]).to(H)
        fresh = {"H_G": bfgs(torch.where(lost[:, None, None], unit, H), s, y)}
    changes = (inner(s, y) > 0) & _finite(*fresh.values())
    return {name: torch.where(changes[:, None, None], new, known[name]) for name, new in fresh.items()}


def _finite(*stacked: Tensor) -> Tensor:
    return torch.stack([tensor.flatten(1).sum(1) for tensor in stacked]).isfinite().all(0)


def multiply(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return the products of matrices ``[N, d, d]`` and vectors ``[N, d]``."""
    return (matrices @ vectors[:, :, None])[:, :, 0]


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products ``[N]`` of vectors ``[N, d]``."""
    return (left * right).sum(-1)


def damped(s: Tensor, y: Tensor, Hy: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """Return s and y ``[N, d]`` after double damping, with sᵀy > 0 unless s is zero (Goldfarb 2020, algorithm 2).

    First ``s ← θ s + (1 - θ) Hy`` where sᵀy < μ1 yᵀHy, with the θ that makes both equal. Then likewise
    ``y ← θ y + (1 - θ) s`` where sᵀy < μ2 sᵀs; `mu` is μ2.
    """
    sy, yHy = inner(s, y), inner(y, Hy)
    theta = _share(sy, yHy, _MU)[:, None]
    s = theta * s + (1 - theta) * Hy
    sy, ss = inner(s, y), inner(s, s)
    theta = _share(sy, ss, mu)[:, None]
    return s, theta * y + (1 - theta) * s


def _share(found: Tensor, whole: Tensor, mu: float) -> Tensor:
    """Return the θ at which ``θ found + (1 - θ) whole`` is ``mu whole``, where `found` is below that; 1 elsewhere."""
    low = found < mu * whole
    return torch.where(low, (1 - mu) * whole / torch.where(low, whole - found, 1), 1)


def bfgs(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Return ``H + (ρ² yᵀHy + ρ) ssᵀ - ρ (s yᵀH + H y sᵀ)`` with ρ = 1 / sᵀy; H itself where sᵀy is not above 0.

    H ``[N, d, d]`` is symmetric and positive definite, the result exactly symmetric. Cost: 3 N d² multiply-adds.
    """
    sy, Hy = inner(s, y), multiply(H, y)
    curved = sy > 0
    rho = torch.where(curved, 1 / torch.where(curved, sy, 1), 0)
    # Both rank-two terms as one product u sᵀ + s uᵀ.
    u = (0.5 * (rho * rho * inner(y, Hy) + rho))[:, None] * s - rho[:, None] * Hy
    outer = u[:, :, None] * s[:, None, :]
    return (outer + outer.mT).add_(H)  # both terms are zero without curvature


class Compact:
    """``H = I + Zᵀ[(D + YYᵀ)Z - Y] - YᵀZ`` of p pairs, never formed as a matrix (Byrd, Nocedal & Schnabel 1994).

    R = triu(SYᵀ), D = diag(SYᵀ), Z = R⁻¹S. Every pair has sᵀy > 0; zero rows have no effect.
    """

    def __init__(self, S: Tensor, Y: Tensor) -> None:
        """Prepare for S and Y ``[N, p, d]``, one pair per row, the oldest first. Cost: 2.5 N p² d multiply-adds."""
        wide = S.double()  # R is ill-conditioned if pairs are similar
        R = wide @ Y.double().mT
        D = R.diagonal(dim1=-2, dim2=-1).to(S.dtype)
        R.diagonal(dim1=-2, dim2=-1).masked_fill_(D == 0, 1)
        self._Z = torch.linalg.solve_triangular(R.triu(), wide, upper=True).to(S.dtype)
        self._Y = Y
        self._middle = torch.diag_embed(D) + Y @ Y.mT

    def multiply(self, X: Tensor) -> Tensor:
        """Return ``H X`` for X ``[N, d, m]``. Cost: 4 N p d m + N p² m multiply-adds."""
        ZX, YX = self._Z @ X, self._Y @ X
        product: Tensor = X + self._Z.mT @ (self._middle @ ZX - YX) - self._Y.mT @ ZX
        return product
