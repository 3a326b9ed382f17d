"""Norm layers and their Fisher written out in full: slow, float64, obviously right, and knowing nothing of natgrad."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FEATURES_LAST = (nn.LayerNorm, nn.RMSNorm)
NORMS = (*FEATURES_LAST, nn.GroupNorm, *BATCH, *INSTANCE)


def normalise(module: nn.Module, x: Tensor) -> Tensor:
    """x̂, by the definition of each norm."""
    if isinstance(module, FEATURES_LAST):
        dims = tuple(range(-len(module.normalized_shape), 0))
        if isinstance(module, nn.RMSNorm):
            eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
            return x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
        return _standardise(x, dims, module.eps)
    if isinstance(module, nn.GroupNorm):
        grouped = x.unflatten(1, (module.num_groups, -1))
        return _standardise(grouped, tuple(range(2, grouped.ndim)), module.eps).flatten(1, 2)
    ndim = {"1": 3, "2": 4, "3": 5}[type(module).__name__[-2]]
    if not module.training and module.running_mean is not None:
        shape = (-1, *[1] * (x.ndim - 2 if isinstance(module, BATCH) else ndim - 2))
        return (x - module.running_mean.view(shape)) / (module.running_var.view(shape) + module.eps).sqrt()
    if isinstance(module, INSTANCE):
        return _standardise(x, tuple(range(2 - ndim, 0)), module.eps)
    return _standardise(x, (0, *range(2, x.ndim)), module.eps)


def _standardise(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(dims, keepdim=True) + eps).sqrt()


def rows(module: nn.Module, values: Tensor, *, batched: bool = True) -> Tensor:
    """What is shaped like the module's input as [B, T, C]."""
    values = values if batched else values[None]
    if isinstance(module, FEATURES_LAST):
        return values.reshape(len(values), -1, module.weight.numel())
    return values.reshape(*values.shape[:2], -1).transpose(1, 2)


class Norm:
    """A norm layer's per-sample gradients [B, C, i], and what follows from them."""

    def __init__(self, per_sample: Tensor) -> None:
        self.per_sample = per_sample

    @classmethod
    def of(
        cls, module: nn.Module, uses: list[tuple[Tensor, Tensor]], *, tokens: bool = False, batched: bool = True
    ) -> Norm:
        """From the inputs and the output gradients of all uses; tokens: positions are samples."""
        gathered = []
        for x, gradient in uses:
            x_hat, g = (rows(module, seen, batched=batched) for seen in (normalise(module, x), gradient))
            if tokens:
                x_hat, g = (each.flatten(0, 1)[:, None] for each in (x_hat, g))
            columns = [(g * x_hat).sum(1)] if trained(module, "weight") else []
            columns += [g.sum(1)] if trained(module, "bias") else []
            gathered.append(torch.stack(columns, -1))
        return cls(sum(gathered))

    @property
    def gradient(self) -> Tensor:
        """W = (1/B) Σ_n u, [C, i]."""
        return self.per_sample.mean(0)

    def fisher(self, form: str) -> Tensor:
        """F = (1/B) Σ_n u uᵀ [C i, C i], without what the form leaves out."""
        size = self.per_sample[0].numel()
        F = torch.zeros(size, size, dtype=self.per_sample.dtype)
        for u in self.per_sample:
            F += torch.outer(u.reshape(-1), u.reshape(-1)) / len(self.per_sample)
        channels = torch.arange(size) // self.per_sample.shape[-1]
        keep = {
            "full": torch.ones(size, size, dtype=torch.bool),
            "unit": channels[:, None] == channels[None, :],
            "diag": torch.eye(size, dtype=torch.bool),
        }
        return F * keep[form]


def solve(W: Tensor, F: Tensor, damping: float) -> Tensor:
    """(F + γI)⁻¹ vec(W)."""
    return torch.linalg.solve(F + damping * torch.eye(len(F), dtype=F.dtype), W.reshape(-1)).reshape(W.shape)


def matrix(module: nn.Module) -> Tensor:
    """The .grad of weight and bias as [C, i], in float64."""
    leaves = [leaf for leaf in ("weight", "bias") if trained(module, leaf)]
    return torch.stack([getattr(module, leaf).grad.reshape(-1).double() for leaf in leaves], -1)


def trained(module: nn.Module, leaf: str) -> bool:
    """Whether the module has this parameter and trains it."""
    parameter = getattr(module, leaf, None)
    return parameter is not None and parameter.requires_grad


def capture(model: nn.Module, total: Callable[[nn.Module], Tensor]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Run `total`, the *sum* of per-sample losses; return each norm's inputs and output gradients, use by use."""
    seen: list[tuple[str, Tensor, Tensor]] = []

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: seen.append((name, inputs[0].detach(), output))

    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if isinstance(m, NORMS)]
    loss = total(model)
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(loss, [output for _, _, output in seen])
    uses: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for (name, x, _), g in zip(seen, gradients, strict=True):
        uses[name].append((x, g))
    return uses
