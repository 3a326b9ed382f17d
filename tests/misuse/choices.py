"""Choices of each kind, which of them go together, and what becomes of a `natgrad.Preconditioner` with them."""

import warnings
from itertools import combinations

import torch

import natgrad

CURVATURES = {
    "kfac": natgrad.KFAC,
    "ekfac": natgrad.EKFAC,
    "sngd": natgrad.SNGD,
    "hylo": natgrad.HyLo,
    "rank-one": natgrad.RankOne,
}
PLACEMENTS = (
    "auto",
    "comm-opt",
    "mem-opt",
    "hybrid:0.5",
    "hybrid:1",
    "reduce-scatter",
    "dp",
    "pipelined",
    "background",
)
REFRESHES = {
    "fixed": lambda: natgrad.Refresh(factors=1, inverses=2),
    "sides": lambda: natgrad.Refresh(factors=natgrad.Sides(inputs=2, gradients=1)),
    "measured": lambda: natgrad.Adaptive(natgrad.TraceRule()),
}

PAIRS_THAT_DO_NOT_WORK = {
    *((("curvature", "ekfac"), ("placement", name)) for name in ("mem-opt", "hybrid:0.5", "reduce-scatter")),
    *((("curvature", name), ("placement", "background")) for name in ("sngd", "hylo")),
    *((("placement", name), ("refresh", "sides")) for name in ("pipelined", "background")),
    *(
        (("curvature", curvature), ("refresh", name))
        for curvature in ("sngd", "hylo")
        for name in ("sides", "measured")
    ),
    (("curvature", "rank-one"), ("refresh", "sides")),
}
# What one process can do all the same.
WORKS_IN_ONE_PROCESS = {pair for pair in PAIRS_THAT_DO_NOT_WORK if ("curvature", "ekfac") in pair}
KINDS = {"curvature": CURVATURES, "placement": PLACEMENTS, "refresh": REFRESHES}
PAIRS = [
    tuple(sorted(((first, one), (second, other))))
    for first, second in combinations(KINDS, 2)
    for one in KINDS[first]
    for other in KINDS[second]
]


def build(curvature="kfac", placement="comm-opt", refresh="fixed"):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return natgrad.Preconditioner(
        model,
        CURVATURES[curvature](),
        optimizer=optimizer,
        placement=placement,
        refresh=REFRESHES[refresh](),
    )


def verdict(**choices):
    """What becomes of a preconditioner with these choices."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            build(**choices)
        except ValueError as error:
            return "refused" if " is not allowed: " in str(error) else f"refused without a word why: {error}"
    return "warned of" if [one for one in caught if one.category is natgrad.NatgradWarning] else "accepted"
