"""Ranks train like one process in float64, and alike to the last bit: every pair of the ways to train."""

from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from random import Random

import pytest
import torch

from tests.distributed.sharded_jobs import Case, Network, Zoo, error, train
from tests.thinning import covering

NETWORKS = {"network": Network, "zoo": Zoo}
CURVATURES = {
    "eigen": Case(),
    "inverse": Case(curvature={"form": "inverse"}),
    "iterative": Case(curvature={"form": "iterative"}),
    "reduce": Case(curvature={"sharing": "reduce"}),
    "diagonal": Case(curvature={"max_factor_size": 4}),
    "inputs": Case(curvature={"sides": "a"}),
    "ekfac": Case(kind="EKFAC"),
    "rank one": Case(kind="RankOne"),
    "spectral": Case(kind="Spectral"),
    "norms": Case(kind="UnitWise", curvature={"form": "full"}),
    "sngd": Case(kind="SNGD"),
    "hylo": Case(kind="HyLo", curvature={"rank": 1.0, "method": "kid"}),  # all rows
}
WRAPPERS = {
    "ddp": {"wrapper": "ddp"},
    "reduce": {"wrapper": "plain", "ragged": True, "options": {"gradients": "reduce"}},
    "root": {"wrapper": "root"},
    "layers": {"wrapper": "layers"},
    "hsdp": {"wrapper": "layers", "mesh": (2, 2)},
}
PLACEMENTS = ("comm-opt", "mem-opt", "hybrid:0.5", "reduce-scatter", "pipelined")
# KID leaves out what is below 1e-12 of the kernel.
TOLERANCE = {"hylo": 1e-6}


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    network: str
    curvature: str
    wrapper: str
    placement: str
    ranks: int
    micro_batches: int

    @property
    def is_supported(self) -> bool:
        """Whether it works, and does what one process does with the whole batch."""
        if self.curvature == "ekfac" and self.placement not in ("comm-opt", "pipelined"):
            return False
        if self.wrapper == "hsdp" and self.ranks != 4:
            return False
        if self.micro_batches > 1 and (self.ranks == 3 or (self.wrapper, self.ranks) == ("reduce", 4)):
            return False  # its samples do not divide
        if self.curvature == "rank one" and self.micro_batches > 1:
            return False  # a rank-one Fisher is that of the mean gradient of each pass
        if self.curvature == "hylo" and self.wrapper == "reduce":
            return False  # ranks with more rows than others select some of them
        # Of singular factors the eigenvectors, in which EKFAC measures, are decided by rounding.
        return not (self.curvature == "ekfac" and self.network == "network")

    def case(self) -> Case:
        """Return what each rank does."""
        way = WRAPPERS[self.wrapper]
        options = {"placement": self.placement, **way.get("options", {})}
        alone = replace(self.alone(), micro_batches=self.micro_batches)
        return replace(alone, **{**way, "options": options})

    def alone(self) -> Case:
        """Return what one process does."""
        return replace(CURVATURES[self.curvature], network=NETWORKS[self.network])


EVERY = [Cell(*values) for values in product(NETWORKS, CURVATURES, WRAPPERS, PLACEMENTS, (1, 2, 3, 4), (1, 3))]
# Every pair occurs among these, and they are covered faster than all.
SUPPORTED = Random(0).sample([cell for cell in EVERY if cell.is_supported], 1200)
CELLS = [
    SUPPORTED[place] for place in covering([{k: str(v) for k, v in asdict(cell).items()} for cell in SUPPORTED], 2)
]


@cache
def expected(case_key: tuple[str, str]) -> dict[str, torch.Tensor]:
    network, curvature = case_key
    return train(replace(CURVATURES[curvature], network=NETWORKS[network]))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, asdict(cell).values())))
def test_ranks_equal_one_process(ranks, cell):
    alone = expected((cell.network, cell.curvature))
    first, *others = ranks.run(cell.ranks, train, cell.case())
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert error(first, alone) <= TOLERANCE.get(cell.curvature, 1e-10)
