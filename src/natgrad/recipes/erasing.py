"""Random erasing to zero."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from natgrad.capture.sampled import seed_of
from natgrad.errors import describe, require
from natgrad.printed import call_text
from natgrad.schedule import check_number, check_whole, is_whole

AREA = (0.02, 0.25)
"""The smallest and the largest share of the image that is erased."""

RATIO = (0.3, 1.0)
"""The smallest and the largest ratio of the rectangle's sides."""

ATTEMPTS = 100
"""The largest number of draws of a rectangle that fits; then the image is not erased."""


class ZeroErasing:
    """Sets a rectangle of some images to zero (Osawa 2019, section 4.1; Zhong et al. 2017, arXiv 1708.04896).

    Each image is erased with probability p. The area is S = HW·U(.02, .25), the ratio r = U(.3, 1), the sides
    H_e = √(S r) and W_e = √(S / r), rounded and swapped with probability 1/2. If the rectangle does not fit, it is
    drawn again. Its position in the image is uniform. For inputs of mean zero, erased pixels have the mean value.

    Call it after `RunningMixup`, so that the next mixture uses samples without erasing.
    """

    def __init__(self, probability: float = 0.5, *, seed: int = 0, rank: int | None = None) -> None:
        """Start at step 0.

        Args:
            probability: p, in [0, 1].
            seed: The rectangles are a function of seed, rank and step.
            rank: The rank of this process; None: its rank in the default process group, or 0.

        Raises:
            ValueError: if an argument is not allowed.
        """
        check_number("probability", probability, "in [0, 1]", minimum=0)
        require(probability <= 1, "probability", probability, "in [0, 1]")
        require(is_whole(seed), "seed", seed, "a whole number")
        check_whole("rank", rank, 0, optional=True)
        self.probability, self.seed = probability, seed
        self.rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
        self.steps = 0

    def __repr__(self) -> str:
        return call_text(self, probability=self.probability, seed=self.seed, rank=self.rank)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return a copy of images ``[B, ..., H, W]`` with rectangles of some set to zero.

        Raises:
            ValueError: if they have fewer than three dimensions.
        """
        require(inputs.ndim >= 3, "inputs", describe(inputs), "images [B, ..., H, W]")
        generator = Generator().manual_seed(seed_of("erasing", self.seed, self.rank, self.steps))
        height, width = inputs.shape[-2:]
        boxes = self.boxes(len(inputs), height, width, generator).to(inputs.device, non_blocking=True)
        self.steps += 1
        rows, columns = (_between(boxes[:, axis], boxes[:, 2 + axis], inputs.shape[axis - 2]) for axis in (0, 1))
        erased = rows[:, :, None] & columns[:, None]
        shape = [len(inputs), *[1] * (inputs.ndim - 3), height, width]
        return inputs.masked_fill(erased.view(shape), 0)

    def boxes(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        """Return the rectangles of `count` images: top, left, height, width ``[count, 4]``; zeros for none."""
        boxes = torch.zeros(count, 4, dtype=torch.long)
        missing = torch.nonzero(torch.rand(count, generator=generator) < self.probability)[:, 0]
        for _ in range(ATTEMPTS):
            if not len(missing):
                break
            area, ratio, swap, top, left = torch.rand(5, len(missing), generator=generator, dtype=torch.float64)
            area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * area)
            ratio = RATIO[0] + (RATIO[1] - RATIO[0]) * ratio
            ratio = torch.where(swap < 0.5, ratio, 1 / ratio)
            sides = torch.stack(((area * ratio).sqrt(), (area / ratio).sqrt()), 1).round()
            room = torch.tensor((height, width)) - sides
            corner = torch.stack((top, left), 1).mul(room + 1).floor()  # uniform
            fits = (room >= 0).all(1)
            boxes[missing[fits]] = torch.cat((corner, sides), 1)[fits].long()
            missing = missing[~fits]
        return boxes

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self.steps = int(state["steps"])


def _between(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return a mask ``[n, size]`` of the `length` indices from `start` on."""
    places = torch.arange(size, device=start.device)
    return (places >= start[:, None]) & (places < (start + length)[:, None])
