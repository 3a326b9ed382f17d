"""The KL clip: bounds how far a step changes the model's prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from natgrad.curvature import Curvature
from natgrad.damping.trust_region import TrustRegion, copied
from natgrad.distributed import Communicator
from natgrad.layers import Layer
from natgrad.linalg import tensor_on
from natgrad.linalg.joined import joined, parted
from natgrad.preconditioner.gradients.stacked import Entry, Gradients, alike

# Recognised by identity: only a value that the user passes requires an optimizer.
USUAL_BOUND = float("1e-3")


class Clip:
    """ν = min(1, sqrt(κ / (lr² Σ_layers abs⟨V_i, ∇_i⟩)), which bounds lr² ν² VᵀFV by κ (Pauloski 2022, eq. 16).

    Attributes:
        optimizer: Its learning rates are read at each step. A layer's rate is that of its first trained parameter.
        bound: κ, or a `TrustRegion`. None: off.
        last: ν of the last step, or s of a trust region, a device tensor; 1.0 while off.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        bound: float | TrustRegion | None,
        covered: Iterable[tuple[Layer, Curvature]] = (),
    ) -> None:
        """Check the arguments.

        Raises:
            ValueError: if a trust region does not support the optimizer or a `covered` curvature.
        """
        if isinstance(bound, TrustRegion):
            bound.check(optimizer, covered)
        self.optimizer = optimizer
        self.bound = bound if optimizer is not None else None
        self.last: float | Tensor = 1.0

    def for_copies(self, copies: Mapping[int, nn.Parameter]) -> Clip:
        """Return a clip with the present learning rates for copies of parameters, by the ``id`` of the originals."""
        if isinstance(self.bound, TrustRegion) and self.optimizer is not None:
            return Clip(copied(self.optimizer, copies), self.bound)
        rates = self._rates() if self.optimizer is not None else {}
        groups = [{"params": [copy], "lr": rates[key]} for key, copy in copies.items() if key in rates]
        return Clip(torch.optim.SGD(groups) if groups else None, self.bound)

    def describe(self) -> str:
        """Return a description of the clip."""
        if self.bound is not None:
            return f"KL clip {self.bound:g}" if isinstance(self.bound, float) else str(self.bound)
        return "KL clip off" + (": no optimizer to read the learning rate from" if self.optimizer is None else "")

    def apply(
        self,
        gradients: Gradients,
        scale: float | Tensor,
        runtime: Communicator,
        *,
        shares_work: bool,
        layer_scale: Callable[[Layer], float | Tensor] | None = None,
    ) -> list[Tensor]:
        """Scale the preconditioned gradients by ν. Blocks that are not finite become zero.

        Args:
            gradients: Raw and preconditioned gradients of all groups.
            scale: The factor that makes the raw gradients those of the mean loss.
            runtime: The ranks.
            shares_work: Whether each rank holds the curvature of some layers only.
            layer_scale: Returns an additional factor for a layer. None: 1 for all.

        Returns:
            For each entry, which blocks were not finite ``[N]`` (bool).
        """
        if isinstance(self.bound, TrustRegion):
            assert self.optimizer is not None
            bad = [~entry.inner.isfinite() for entry in gradients.entries]
            gradients.clear_(bad)
            self.last = self.bound.hold(gradients, self.optimizer, runtime, shares_work=shares_work)
            return bad
        return self._scale(gradients, scale, self.bound, layer_scale)

    def _scale(
        self,
        gradients: Gradients,
        scale: float | Tensor,
        bound: float | None,
        layer_scale: Callable[[Layer], float | Tensor] | None,
    ) -> list[Tensor]:
        rates = self._rates() if bound is not None else {}
        if layer_scale is not None:
            for layer in (member.layer for entry in gradients.entries for member in entry.members):
                first = id(layer.slots[0].parameter)
                rates[first] = rates.get(first, 0.0) * layer_scale(layer)
        total: Tensor | None = None
        bad: dict[int, Tensor] = {}
        for entries in alike(gradients.entries):
            inner = [entry.inner for entry in entries]
            size = joined(inner).abs()
            fine = size < torch.inf
            bad.update(zip(map(id, entries), parted(~fine, inner), strict=True))
            if bound is not None and any(entry.is_clipped for entry in entries):
                share = torch.where(fine, size, 0).mul_(_squares(rates, entries, size)).sum()
                total = share if total is None else total + share.to(total)
        nu: float | Tensor = 1.0
        if total is not None and bound is not None:
            nu = (bound / (total * scale * scale)).sqrt_().clamp_(max=1.0)
            self.last = nu
        found = [bad[id(entry)] for entry in gradients.entries]
        gradients.clear_(found)
        gradients.scale_(nu)
        return found

    def _rates(self) -> dict[int, float | Tensor]:
        assert self.optimizer is not None
        return {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}


def _squares(rates: Mapping[int, float | Tensor], entries: Sequence[Entry], like: Tensor) -> float | Tensor:
    """Return the squared learning rate of each block, 0 for blocks without curvature, or one number for all."""
    found: list[float | Tensor] = []
    for entry in entries:
        firsts = [member.layer.slots[0].parameter for member in entry.members]
        rate: float | Tensor = _rate(rates, firsts, entry.blocks, like) if entry.is_clipped else 0.0
        square = rate * rate
        if entry.plain and isinstance(entry.ready, Tensor):
            square = (entry.ready > 0).to(like) * square
        found.append(square)
    if len(found) == 1 or not any(isinstance(square, Tensor) or square != found[0] for square in found):
        return found[0]
    return torch.cat([like.new_ones(len(own.inner)) * square for own, square in zip(entries, found, strict=True)])


def _rate(
    rates: Mapping[int, float | Tensor], parameters: Sequence[object], blocks: list[int], like: Tensor
) -> float | Tensor:
    """Return the learning rate of each block, or one number if all are equal."""
    values = [rates.get(id(parameter), 0.0) for parameter in parameters]
    if all(value is values[0] for value in values) or (
        not any(isinstance(value, Tensor) for value in values) and len(set(values)) == 1
    ):
        return values[0]
    numbers = [float(value) for value in values if not isinstance(value, Tensor)]
    if len(numbers) == len(values):
        own = tensor_on(like.device, numbers, like.dtype)
    else:
        own = torch.stack([torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in values])
    return own.repeat_interleave(tensor_on(like.device, blocks), output_size=len(like))
