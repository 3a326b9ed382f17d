"""Predicted whole steps on 2 to 4,096 ranks behind three links, over AdamW's under DDP.

    python -m benchmarks.many_nodes [--rounds 3]

What a rank computes is timed here, in one process on one thread: the passes of 1,024 tokens, a plain step, and what
factors and decompositions add. What part of it the busiest rank does, and what it sends or receives, is natgrad's plan
for that many ranks. A step takes ::

    forward + max(backward and factors, messages of gradients) + AdamW + decompositions and messages of their results
        + max(preconditioning, messages of preconditioned gradients)

"comm-opt" sends factors before gradients are preconditioned, "reduce" (``gradients="reduce"``) natural Muon's
together with the gradients, and K-FAC's with the results of decompositions. A message takes the busiest rank's bytes
over the rate, and 2 log2(P) latencies.

Two of the links join devices that are so many times as fast, with more tokens a rank. This holds for products; memory
and decompositions gain less. Left out are the cuts of messages, congestion, the spread of a refresh over several steps,
and waiting for slow ranks. So a step is predicted at its best.

The first table sets two ranks at 200 Mbit/s beside what `benchmarks.nodes` has measured. The other predictions have at
least its error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import nodes
from benchmarks.common import RESULTS, conditions, interleave, median, save
from benchmarks.models import GPT2_SHAPES, WORKLOADS, Workload
from natgrad import Placement
from natgrad.distributed import LayerDemand, Plan, make_plan
from natgrad.distributed.plan import Collective

RANKS = (2, 8, 64, 512, 4096)
FLOAT = 4  # bytes
NARROW = 0.5  # the bytes of natural Muon's updates, which are sent in bfloat16, over those in float32
LAP = 2  # steps


@dataclass(frozen=True)
class Link:
    """A link between any two ranks, and the devices that it joins.

    Attributes:
        name: The name in the tables.
        rate: The bits per second, in each direction.
        latency: The seconds until a message arrives.
        speed: The speed of a device, with this processor's as 1.
        tokens: The tokens of a rank, in units of 1,024.
    """

    name: str
    rate: float
    latency: float = 0.0
    speed: float = 1.0
    tokens: float = 1.0

    def seconds(self, elements: float, ranks: int) -> float:
        """Return the time of a message of which the busiest of the ranks sends or receives so many elements."""
        return FLOAT * 8 * elements / self.rate + 2 * log2(ranks) * self.latency if elements else 0.0


SLOW = Link("200 Mbit/s", 200e6)
LINKS = (SLOW, Link("25 Gbit/s", 25e9, 2e-5, 800, 8), Link("400 Gbit/s", 400e9, 5e-6, 5000, 32))


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the tables.

    Attributes:
        optimizer: The name of the timed optimizer.
        placement: The placement. None: an optimizer without curvature, whose steps are alike on all ranks.
        reduces: Whether natgrad averages the gradients.
        factors: The steps between updates of the factors.
        inverses: The steps between decompositions.
    """

    optimizer: str
    placement: Placement | None = None
    reduces: bool = False
    factors: float = 1.0
    inverses: float = 1.0


def _methods() -> dict[str, Method]:
    methods = {nodes.ADAMW: Method(optimizer="adamw"), "torch.optim.Muon": Method(optimizer="muon")}
    everywhere = Placement(name="comm-opt")
    # What "auto" chooses where natgrad averages the gradients.
    owned, deferred = Placement(name="reduce-scatter"), Placement(name="mem-opt", deferred=True)
    for name, natural, kfac in (("comm-opt", everywhere, everywhere), ("reduce", owned, deferred)):
        placed = partial(Method, reduces=name == "reduce")
        methods[f"natural Muon, {name}"] = placed(optimizer="natural", placement=natural, factors=100.0, inverses=100.0)
        for factors in (10, 1):
            intervals: dict[str, Any] = {"factors": float(factors), "inverses": 10.0 * factors}
            methods[f"K-FAC ({factors}, {10 * factors}), {name}"] = placed(
                optimizer="kfac", placement=kfac, **intervals
            )
    return methods


METHODS = _methods()


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process takes, in seconds, and what it computes.

    Attributes:
        forward: A forward pass.
        backward: A backward pass.
        step: A plain step of each optimizer, without the passes.
        factors: What an update of the factors adds to a step of natural Muon and of K-FAC.
        inverses: What decompositions add.
        parameters: The number of elements of all parameters.
        layers: The demands of the layers of natural Muon and of K-FAC.
    """

    forward: float
    backward: float
    step: Mapping[str, float]
    factors: Mapping[str, float]
    inverses: Mapping[str, float]
    parameters: int
    layers: Mapping[str, Mapping[str, LayerDemand]]


def time_work(workload: Workload, rounds: int) -> Work:
    """Time everything in turn, on one thread."""
    torch.set_num_threads(1)
    adamw, muon = nodes.adamw(None, workload), nodes.muon(None, workload)
    curved = {
        "natural": nodes.natural_muon(None, workload, spread=1),
        "kfac": nodes.kfac(None, workload, factors=10),
    }

    def passes() -> dict[str, float]:
        seconds = {"forward": 0.0, "backward": 0.0}
        for _ in range(LAP):
            adamw.optimizers[0].zero_grad()
            start = perf_counter()
            loss = workload.loss(adamw.replica(adamw.inputs), adamw.labels)
            middle = perf_counter()
            loss.backward()
            seconds["forward"] += (middle - start) / LAP
            seconds["backward"] += (perf_counter() - middle) / LAP
        return seconds

    def steps(training: nodes.Training, *laps: str) -> dict[str, float]:
        seconds = {}
        for training.lap in ("none", *laps):  # what a step begins, the next one may end
            start = perf_counter()
            for training.place in range(LAP):
                training.step()
            seconds[training.lap] = perf_counter() - start
        return seconds

    subjects = {"adamw": partial(steps, adamw), "muon": partial(steps, muon)}
    subjects |= {name: partial(steps, training, "factors", "all") for name, training in curved.items()}
    times = interleave({"passes": passes, **subjects}, rounds=rounds, title=workload.title)
    both = times["passes/forward"] + times["passes/backward"]

    def added(name: str, lap: str, without: str) -> float:
        return max(0.0, median(times[f"{name}/{lap}"] - times[f"{name}/{without}"]))

    plans = {
        "natural": curved["natural"].optimizers[0].preconditioner.plan,  # type: ignore[attr-defined]
        "kfac": curved["kfac"].preconditioner.plan,
    }
    return Work(
        forward=median(times["passes/forward"]),
        backward=median(times["passes/backward"]),
        step={name: max(0.0, median(times[f"{name}/none"] / LAP - both)) for name in subjects},
        factors={name: added(name, "factors", "none") for name in curved},
        inverses={name: added(name, "all", "factors") for name in curved},
        parameters=sum(parameter.numel() for parameter in adamw.model.parameters()),
        layers={name: plan.layers for name, plan in plans.items()},
    )


def predict(method: Method, work: Work, ranks: int, link: Link) -> float:
    """Return the seconds of a mean step."""
    name, passes = method.optimizer, link.tokens / link.speed
    forward, backward = passes * work.forward, passes * work.backward
    gradients = link.seconds(2 * (ranks - 1) / ranks * work.parameters, ranks)
    if method.placement is None:
        return forward + max(backward, gradients) + work.step[name] / link.speed
    plan = make_plan(method.placement, work.layers[name], ranks)
    sizes = {moment: _busiest(sent) for moment, sent in plan.exchanges().items()}
    sizes["step"] *= NARROW if name == "natural" else 1
    messages = {moment: link.seconds(size, ranks) for moment, size in sizes.items()}
    if method.reduces:
        curved = sum(layer.gradients for layer in plan.layers.values())
        uncurved = 2 * (ranks - 1) / ranks * (work.parameters - curved)
        gradients = link.seconds(_busiest([_to_owners(plan)]) + uncurved, ranks)
    adamw = work.step["adamw"] / link.speed  # that natural Muon moves its matrices itself takes no longer
    curvature = max(0.0, work.step[name] - work.step["adamw"]) * _largest_part_of_step(plan) / link.speed
    refresh = work.inverses[name] * _largest_part_of_refresh(plan) / link.speed + messages["inverses"]

    def step(*, factors: bool, inverses: bool) -> float:
        computed = backward + factors * passes * work.factors[name]
        factor_messages = factors * messages["factors"]
        sent = gradients + (factor_messages if method.reduces else 0.0)
        waited = 0.0 if method.reduces else factor_messages
        return forward + max(computed, sent) + adamw + waited + inverses * refresh + max(curvature, messages["step"])

    for_factors, for_all = 1 / method.factors, 1 / method.inverses
    return (
        (1 - for_factors) * step(factors=False, inverses=False)
        + (for_factors - for_all) * step(factors=True, inverses=False)
        + for_all * step(factors=True, inverses=True)
    )


def _largest_part_of_step(plan: Plan[str]) -> float:
    """Return the part of preconditioning that the busiest rank does."""
    costs = [0.0] * plan.columns
    for key, layer in plan.layers.items():
        costs[plan.column_of(key)] += layer.step_cost
    return max(costs) / sum(costs)


def _largest_part_of_refresh(plan: Plan[str]) -> float:
    """Return the part of the decompositions that the busiest rank does."""
    costs = [0.0] * plan.ranks
    for key, assignment in plan.assignments.items():
        for part, owner in assignment.owners.items():
            costs[owner] += plan.layers[key].parts[part]
    return max(costs) / sum(costs)


def _to_owners(plan: Plan[str]) -> Collective:
    """Return the message of gradients to the workers of their layers."""
    owned = [0] * plan.ranks
    for key, layer in plan.layers.items():
        owned[plan.column_of(key)] += layer.gradients
    return Collective(range(plan.ranks), tuple(owned), reduces=True)


def _busiest(messages: list[Collective]) -> float:
    """Return the elements that the busiest rank sends, or receives if these are more."""
    ranks = {rank for message in messages for rank in message.ranks}
    received = [replace(message, reduces=not message.reduces) for message in messages]
    return max((sum(one.sent(rank) for one in way) for way in (messages, received) for rank in ranks), default=0.0)


def show(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of ratios."""
    table = Table("", *next(iter(rows.values())), title=title)
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in values.values()))
    return table


def main(rounds: Annotated[int, typer.Option(min=1, help="Rounds over which the medians are taken.")] = 3) -> None:
    """Time one process, predict, print the tables, and write benchmarks/results/many_nodes.json."""
    work = time_work(WORKLOADS["encoder"], rounds)
    found = json.loads((RESULTS / "nodes_ddp_200mbit.json").read_text())["rows"]
    measured = {row["name"]: row["over_adamw"] for row in found}
    base = predict(METHODS[nodes.ADAMW], work, 2, SLOW)
    check = {
        name: {"predicted": predict(method, work, 2, SLOW) / base, "measured": measured[name]}
        for name, method in METHODS.items()
    }
    console = Console()
    console.print(show(f"{WORKLOADS['encoder'].title}: 2 ranks, {SLOW.name}", check))
    work, tables = time_work(GPT2_SHAPES, rounds), dict[str, Any]()
    for link in LINKS:
        tables[link.name] = {}
        bases = {ranks: predict(METHODS[nodes.ADAMW], work, ranks, link) for ranks in RANKS}
        for name, method in METHODS.items():
            row = {f"{ranks:,} ranks": predict(method, work, ranks, link) / bases[ranks] for ranks in RANKS}
            tables[link.name][name] = row
        console.print(show(f"{GPT2_SHAPES.title}: {link.name}", tables[link.name]))
    result = conditions() | {"rounds": rounds, "check": check, "predicted": tables}
    typer.echo(f"Written to {save('many_nodes', result).relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    typer.run(main)
