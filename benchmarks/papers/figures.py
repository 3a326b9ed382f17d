"""Each figure: its contenders, what is measured, and what the paper reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Measure = Literal["epochs", "seconds", "metric"]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method, whose learning rate is searched.

    Attributes:
        settings: Fields of its job.
        rates: The learning rates of the search; every contender of a figure has as many.
        paper: What the paper reports for it, in the figure's measure; empty: nothing.
    """

    settings: Mapping[str, Any]
    rates: tuple[float, ...]
    paper: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure or table of a paper.

    Attributes:
        title: Paper, number and subject.
        paper: Its model and data.
        task: The task here.
        shared: Fields of every job.
        contenders: The contenders by name.
        reference: The contender that the others are compared with.
        measure: "metric": the final metric. "epochs", "seconds": what a method needs to reach the reference's median
            final metric, over what the reference needs.
        seeds: Fresh seeds of each contender at its best learning rate.
        first: Fields of a run before all others, which start from its weights; its folder is their `start_from`.
        note: What else was found, for the page.
        hours: About how long all its runs take on one processor.
    """

    title: str
    paper: str
    task: str
    shared: Mapping[str, Any]
    contenders: Mapping[str, Contender]
    reference: str
    measure: Measure
    seeds: int = 3
    first: Mapping[str, Any] | None = None
    note: str = ""
    hours: float | None = None


_CLIPPED = {"damping": 3e-2, "kl_clip": 1e-3, "factors": 5, "inverses": 10}


def _sgd(paper: str = "", rates: tuple[float, ...] = (0.05, 0.1, 0.2), **settings: Any) -> Contender:
    return Contender(settings={"optimizer": "sgd", "options": {"momentum": 0.9}, **settings}, rates=rates, paper=paper)


def _adam(paper: str = "") -> Contender:
    return Contender(settings={"optimizer": "adam"}, rates=(2e-3, 4e-3, 8e-3), paper=paper)


def _curvature(name: str, paper: str = "", rates: tuple[float, ...] = (0.05, 0.1, 0.2), **more: Any) -> Contender:
    """Return SGD with momentum beside a curvature, with Pauloski's KL clip and a damping of 0.03."""
    return _sgd(paper, rates, **{"curvature": name, **_CLIPPED, **more})


_LAMB = (8e-3, 1.6e-2, 3.2e-2)
_WIDER = (0.025, 0.05, 0.1, 0.2)


def _hylo(paper: str = "", method: str = "switch") -> Contender:
    """Return HyLo as its authors run it: SGD's rates times the damping, since a step is near g / α, and no KL clip."""
    return _curvature(
        "hylo",
        paper,
        (0.015, 0.03, 0.06),
        damping=0.3,
        kl_clip=None,
        curvature_options={"rank": 0.1, "method": method},
    )


# The residual network and three convolutions on 2,048 glyphs.
_GLYPHS = {"epochs": 24, "batch_size": 128, "schedule": "cosine", "warmup": 19}
# BERT of two layers; 10 epochs of phase 1 are 480 steps, 6 of phase 2 are 138.
_FIRST_PHASE = {"epochs": 10, "batch_size": 32, "schedule": "cosine", "warmup": 40}
_SECOND_PHASE = {
    "task_options": {"phase": 2},
    "start_from": "runs/papers/bert-phase-1",
    "epochs": 6,
    "batch_size": 16,
    "schedule": "cosine",
    "warmup": 14,
}
_SMALL = {"epochs": 12, "batch_size": 128, "schedule": "cosine", "warmup": 10}
# K-FAC has the same numbers on 4 ranks as on one.
_BOTH: tuple[tuple[str, dict[str, Any]], ...] = (("K-FAC", {}), ("DP-KFAC", {"placement": "dp", "workers": 4}))


FIGURES: Mapping[str, Figure] = {
    "pauloski-figure-5": Figure(
        title="Pauloski 2022, figure 5 and table 5: epochs to the first-order accuracy",
        paper="ResNet-50, ImageNet, 64 GPUs",
        task="resnet20-cifar10",
        shared=_GLYPHS,
        contenders={
            "SGD": _sgd("1"),
            "K-FAC": _curvature("kfac", form="eigen"),
            "K-FAC, 16 epochs": _curvature("kfac", "0.57 (43 of 76)", form="eigen", epochs=16),
            "K-FAC, 13 epochs": _curvature("kfac", form="eigen", epochs=13),
        },
        reference="SGD",
        measure="epochs",
        note="In the paper K-FAC's learning rate falls sooner than SGD's; so does it here in the last two rows.",
    ),
    "pauloski-table-1": Figure(
        title="Pauloski 2022, table 1: eigendecompositions and inverses",
        paper="ResNet-32, CIFAR-10, accuracy in % at batches of 256, 512 and 1,024",
        task="3c1f-cifar10",
        shared=_SMALL,
        contenders={
            f"{name}, batch {batch}": _curvature("kfac", paper, _WIDER, form=form, batch_size=batch, **options)
            for batch, eigen, inverse in ((64, "92.76", "92.58"), (128, "92.90", "92.36"), (256, "92.92", "91.71"))
            for name, paper, form, options in (
                ("eigen", eigen, "eigen", {}),
                ("inverse", inverse, "inverse", {"curvature_options": {"pi": False}}),
                ("inverse with π", "", "inverse", {}),
            )
        },
        reference="eigen, batch 64",
        measure="metric",
        seeds=1,
        note="With the paper's inverse form, the damping on both factors, the order is the paper's at 128 and 256. "
        "natgrad's own, which balances the damping by π, is better than both. At 64 the eigen form stays at chance "
        "from the first epoch on, on this seed and at one of four rates in the search (0.67 at another).",
        hours=0.7,
    ),
    "pauloski-table-2": Figure(
        title="Pauloski 2022, table 2 and figure 4: K-FAC and SGD on several ranks, 64 samples on each",
        paper="ResNet-32, CIFAR-10, accuracy in % on 1, 2 and 4 GPUs",
        task="3c1f-cifar10",
        shared=_SMALL,
        contenders={
            **{
                f"SGD, {ranks} x 64": _sgd(paper, workers=ranks, batch_size=64 * ranks)
                for ranks, paper in ((1, "92.76"), (2, "92.77"), (4, "92.58"))
            },
            **{
                f"K-FAC, {ranks} x 64": _curvature("kfac", paper, form="inverse", workers=ranks, batch_size=64 * ranks)
                for ranks, paper in ((1, "92.93"), (2, "92.76"), (4, "92.90"))
            },
        },
        reference="SGD, 1 x 64",
        measure="metric",
        seeds=1,
        note="K-FAC is better on each number of ranks, and loses less where a larger batch leaves fewer steps in 12 "
        "epochs. The paper trains long enough for all to end alike.",
        hours=0.4,
    ),
    "pauloski-table-4": Figure(
        title="Pauloski 2022, table 4: BERT's second phase to the accuracy without K-FAC",
        paper="BERT-Large, Wikipedia, steps of phase 2 to the F1 of SQuAD without K-FAC",
        task="bert-pretraining",
        shared=_SECOND_PHASE,
        contenders={
            "LAMB": Contender(settings={"optimizer": "lamb"}, rates=_LAMB, paper="1"),
            "LAMB and K-FAC": Contender(
                settings={"optimizer": "lamb", "curvature": "kfac", "form": "eigen", **_CLIPPED},
                rates=_LAMB,
                paper="0.64 (1,000 of 1,563)",
            ),
        },
        reference="LAMB",
        measure="epochs",
        note="This decides nothing: on so little text both learn little more than how often words occur (accuracy "
        "0.137 after 480 steps of phase 1, 0.13 after 138 of phase 2).",
        first={**_FIRST_PHASE, "optimizer": "lamb", "learning_rate": 1.6e-2, "seed": 1000},
    ),
    "pauloski-table-5": Figure(
        title="Pauloski 2022, table 5 and figure 6: steps between decompositions",
        paper="ResNet-50, ImageNet, accuracy in % with SGD and every 100, 500 and 1,000 of 40,000 steps",
        task="resnet20-cifar10",
        shared=_SMALL,
        contenders={
            "SGD": _sgd("76.2", (0.1, 0.2)),
            **{
                f"every {steps} of 192 steps": _curvature(
                    "kfac", paper, (0.1, 0.2), form="eigen", factors=max(1, steps // 10), inverses=steps
                )
                for steps, paper in ((5, "76.2"), (25, "76.1"), (50, "75.5"))
            },
        },
        reference="SGD",
        measure="metric",
        seeds=1,
        note="Decompositions of up to 50 steps ago lose nothing here; the paper loses 0.7 % at 1,000.",
        hours=0.7,
    ),
    "pauloski-table-6": Figure(
        title="Pauloski 2022, table 6: Mask R-CNN with K-FAC on its box and mask heads",
        paper="Mask R-CNN, COCO, 32 GPUs, steps to the mAP without K-FAC",
        task="maskrcnn-coco",
        shared={"epochs": 20, "batch_size": 8, "schedule": "cosine", "warmup": 64},
        contenders={
            "SGD": _sgd("1", (0.01, 0.02, 0.04)),
            "K-FAC": _curvature("kfac", "0.80 to 0.93", (0.01, 0.02, 0.04), form="inverse"),
            "K-FAC, damping 0.1": _curvature("kfac", "", (0.01, 0.02, 0.04), form="inverse", damping=0.1),
        },
        reference="SGD",
        measure="epochs",
        seeds=1,
        note="With the damping of the other figures K-FAC diverges at 0.02 and 0.04, and 0.01 is too small for the end "
        "of the training. With 0.1 it trains at 0.02, and needs 0.56 of SGD's epochs. One seed; K-FAC had two values "
        "of damping for each rate, and SGD's best rate is the greatest of its three.",
        hours=2,
    ),
    "osawa-figure-6": Figure(
        title="Osawa 2019, figure 6: diagonal norm layers, and stale factors",
        paper="ResNet-50, ImageNet, batches of 32,768, accuracy: with both about that without either",
        task="resnet20-cifar10",
        shared={**_SMALL, "epochs": 8, "batch_size": 256},
        contenders={
            name: _curvature("kfac", rates=(0.1, 0.2), form="inverse", factors=1, inverses=1, **more)
            for name, more in (
                ("no approximation", {"norm_form": "full"}),
                ("diagonal", {"norm_form": "diag"}),
                ("stale", {"norm_form": "full", "refresh": "growing"}),
                ("stale and diagonal", {"norm_form": "diag", "refresh": "growing"}),
            )
        },
        reference="no approximation",
        measure="metric",
        seeds=1,
        note="As in the paper neither approximation costs accuracy, here in 64 steps, far from the end of training.",
        hours=0.6,
    ),
    "hylo-figure-4": Figure(
        title="HyLo 2022, figure 4b: time to the target on one GPU",
        paper="3C1F, Fashion-MNIST: HyLo up to 3 times as fast as K-FAC, which misses its accuracy by 0.95 %",
        task="3c1f-cifar10",
        shared=_SMALL,
        contenders={
            "K-FAC": _curvature("kfac", "1", form="inverse"),
            "HyLo": _hylo("0.33 at best"),
            "SGD": _sgd(),
            "Adam": _adam(),
        },
        reference="K-FAC",
        measure="seconds",
        note="HyLo has the damping of its authors' scripts, and like these no KL clip. It is better than SGD and worse "
        "than K-FAC, and spends a thirtieth of K-FAC's time on curvature. On the seed of the search SGD has 0.67, "
        "K-FAC 0.78, and HyLo with other settings: all rows 0.68; a tenth of damping and rate 0.67, ten times both "
        "0.59; the authors' rows of convolutions, which hardly count, 0.65; new rows at each step 0.39; sampled labels "
        "and damping 0.03 0.70; a KL clip 0.65 at each of three rates, as it decides the size of a step. K-FAC has "
        "0.78 with the factors of a single batch, and 0.75 on the linear layer alone. So the reason is not its running "
        "averages but the product: its factors hold every pair of an input and a gradient, HyLo's rows those of the "
        "same sample, and the rest of a gradient moves as in SGD at lr / damping. The authors' network has a "
        "linear layer of 10,368 inputs, whose factor takes K-FAC long; here it has 4,096.",
    ),
    "hylo-figure-6": Figure(
        title="HyLo 2022, figure 6: epochs to the target",
        paper="ResNet-32, CIFAR-10, 32 GPUs: HyLo above K-FAC and SGD at each epoch",
        task="resnet20-cifar10",
        shared=_GLYPHS,
        contenders={
            "SGD": _sgd(),
            "K-FAC": _curvature("kfac", form="eigen"),
            "HyLo": _hylo(),
        },
        reference="SGD",
        measure="epochs",
        hours=0.4,
    ),
    "hylo-table-3": Figure(
        title="HyLo 2022, table III: switching by the gradient, and at random",
        paper="ResNet-32, CIFAR-10, accuracy in % (and in 0.52 of the time of random switching)",
        task="3c1f-cifar10",
        shared=_SMALL,
        contenders={
            name: _hylo(paper, method)
            for name, method, paper in (
                ("HyLo", "switch", "92.32"),
                ("random", "random", "91.68"),
                ("KID", "kid", ""),
                ("KIS", "kis", ""),
            )
        },
        reference="HyLo",
        measure="metric",
        hours=0.3,
    ),
    "dp-kfac-table-3": Figure(
        title="DP-KFAC 2022, table 3, figures 6 and 9: accuracy at the same global batch",
        paper="ResNet-110, CIFAR-10, 4 GPUs, accuracy in %",
        task="3c1f-cifar10",
        shared=_SMALL,
        contenders={
            "SGD": _sgd("93.25"),
            "K-FAC": _curvature("kfac", "93.89", form="inverse"),
            "DP-KFAC, 4 ranks": _curvature("kfac", "93.99", form="inverse", placement="dp", workers=4),
        },
        reference="K-FAC",
        measure="metric",
        note="DP-KFAC is within the spread of K-FAC's seeds.",
    ),
    "dp-kfac-table-6": Figure(
        title="DP-KFAC 2022, table 6: samples on each of 4 ranks",
        paper="ResNet-110, CIFAR-10, accuracy in % with 32, 64 and 128 samples on each of 4 GPUs",
        task="3c1f-cifar10",
        shared=_SMALL,
        contenders={
            f"{name}, {local} samples": _curvature("kfac", paper, form="inverse", batch_size=4 * local, **ranks)
            for local, papers in ((8, ("93.84", "94.03")), (16, ("93.95", "94.04")), (64, ("94.00", "94.02")))
            for (name, ranks), paper in zip(_BOTH, papers, strict=True)
        },
        reference="K-FAC, 16 samples",
        measure="metric",
        seeds=1,
        note="With 64 samples on each rank DP-KFAC is level, with 8 and 16 it loses 0.045 and 0.053 on one seed: the "
        "factors are of a quarter of the samples, and figure 11 has the same loss at a small damping.",
        hours=0.5,
    ),
    "dp-kfac-figure-11": Figure(
        title="DP-KFAC 2022, figure 11: damping and steps between updates, 4 ranks, 32 samples on each",
        paper="ResNet-110, CIFAR-10, 4 GPUs, mean accuracy of 16 settings: K-FAC 94.07, DP-KFAC 94.05 %",
        task="3c1f-cifar10",
        shared={**_SMALL, "epochs": 6},
        contenders={
            f"{name}, damping {damping:g}, every {steps}": _curvature(
                "kfac", form="inverse", damping=damping, factors=steps, inverses=steps, **ranks
            )
            for damping in (3e-3, 3e-2, 3e-1)
            for steps in (2, 10)
            for name, ranks in _BOTH
        },
        reference="K-FAC, damping 0.03, every 2",
        measure="metric",
        seeds=1,
        note="At the damping of 0.03 and ten times that DP-KFAC is as good as K-FAC (differences from -0.029 to 0.024 "
        "on one seed, half the epochs of the other figures). At a tenth, 0.003, it loses 0.04 and 0.12: the factors of "
        "32 samples need the damping. The paper has no such gap, with 94.05 and 94.07 over all its settings.",
        hours=0.9,
    ),
    "daso-table-2": Figure(
        title="DASO 2021, table 2 and figure 6: accuracy by B and S, 2 nodes of 2 ranks",
        paper="ResNet-50, ImageNet, 8 nodes of 4 GPUs, accuracy in %",
        task="3c1f-cifar10",
        shared={**_SMALL, "workers": 4, "batch_size": 64},
        contenders={
            "all ranks, each step": _sgd(),
            **{
                f"B = {between}, S = {wait}": _sgd(
                    paper,
                    averaging="daso",
                    nodes=2,
                    averaging_options={
                        "batches_between": between,
                        "batches_to_wait": wait,
                        "warmup_epochs": 2,
                        "cooldown_epochs": 2,
                    },
                )
                for between, wait, paper in ((1, 0, "76.77"), (4, 1, "75.83"), (16, 4, "73.18"))
            },
        },
        reference="all ranks, each step",
        measure="metric",
        note="With B = 4 and S = 1, the paper's setting, the accuracy is within the spread of the seeds of that of all "
        "ranks; with B = 16 and S = 4 it falls, as in the paper.",
    ),
}

# What other benchmarks show, and what cannot be run on two processors.
ELSEWHERE: Mapping[str, str] = {
    "Pauloski 2022, figure 7 (time by stage)": "the ranges of `natgrad.step` in torch's profiler",
    "Pauloski 2022, figures 8 and 9 (scaling to 256 GPUs)": "needs GPUs on several machines",
    "Pauloski 2022, table 3 (SQuAD)": "`natgrad train bert-squad`: days here",
    "Osawa 2019, figures 2 and 4 (time, bytes)": "`python -m benchmarks.placement`",
    "Osawa 2019, table 1 and figure 3 (large batches)": "`python -m benchmarks.large_batch`",
    "Osawa 2019, figure 5 (drift of factors)": "`natgrad analyze --figure drift`",
    "HyLo 2022, figures 4a and 5 (accuracy over time)": "needs GPUs; `natgrad train densenet-cifar100` trains",
    "HyLo 2022, figures 10 to 12 (rank, norms, errors)": "`natgrad analyze --figure rank,norms,error`",
    "HyLo 2022, figures 7 to 9 (time by stage, speedup)": "needs many GPUs; `python -m benchmarks.curvature` has steps",
    "HyLo 2022, table IV (memory)": "`python -m benchmarks.memory`",
    "DP-KFAC 2022, tables 4, 5 and 7, figures 7, 8, 10 and 12 (time, memory)": "`python -m benchmarks.placement`",
    "DASO 2021, tables 1 and 3 (hyper-parameters)": "`natgrad train --recipe daso2021`",
    "DASO 2021, figures 6 and 7 (time on several nodes)": "`python -m benchmarks.daso` through two_nodes.sh",
}
