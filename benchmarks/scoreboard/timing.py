"""What a step costs beside AdamW's, and peak memory.

A block holds whole cycles of refreshes of every method: 100 steps, the least common multiple of the intervals 2, 10,
20, 25 and 100. Methods take the steps of a block in turns of a quarter, in an order drawn anew each round. Block after
block the trainings go on, from their first steps: natural Muon refreshes at steps 0, 1, 2, 4... 64 and 128,
Newton-Muon at 0, 1, 2, 4, 8, 16, 32 and 57, KL-Shampoo at each of the first five. Then all begin again. The
cost of a block is the median over these repeats of its processor time over that of AdamW's block of the same rounds.
The later steps of a run cost what the mean of the blocks after the first does.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from time import process_time

import torch

from benchmarks.common import peak_memory, resident_memory
from benchmarks.scoreboard.methods import METHODS
from benchmarks.scoreboard.run import Spec, Training
from benchmarks.scoreboard.tasks import TASKS

BLOCK, BLOCKS, REPEATS = 100, 2, 3
TURNS = 4  # of a block
EARLY = 1  # blocks that are not like later ones
REVISION = 5  # counts changes here and in natgrad that make earlier step times worthless
MEMORY_STEPS = 30


def usual(task: str, method: str) -> Spec:
    """Return a run with the usual setting."""
    chosen = METHODS[method]
    return Spec(task=task, method=method, rate=chosen.rate / 4, second=chosen.values[0], horizon=1, seed=0)


def step_times(
    task: str,
    methods: Sequence[str],
    reference: str,
    *,
    block: int = BLOCK,
    blocks: int = BLOCKS,
    repeats: int = REPEATS,
) -> dict[str, object]:
    """Time the steps of all methods on a task.

    Returns:
        `seconds`: of a step of the reference. `ratios`: of each method's blocks to the reference's.
    """
    order, shuffle = list(methods), random.Random(0).shuffle
    ratios: dict[str, list[list[float]]] = {method: [[] for _ in range(blocks)] for method in methods}
    seconds = []
    warm = Training(usual(task, reference))
    for _ in range(block // TURNS):
        warm.step()
    for _ in range(repeats):
        trainings = {method: Training(usual(task, method)) for method in methods}
        for place in range(blocks):
            spent = dict.fromkeys(methods, 0.0)
            for turn in range(TURNS):
                steps = block * (turn + 1) // TURNS - block * turn // TURNS
                shuffle(order)
                for method in order:
                    begun = process_time()
                    for _ in range(steps):
                        trainings[method].step()
                    spent[method] += process_time() - begun
            seconds.append(spent[reference] / block)
            for method in methods:
                ratios[method][place].append(spent[method] / spent[reference])
    return {
        "seconds": float(f"{median(seconds):.4g}"),
        "block": block,
        "ratios": {name: [round(median(each), 4) for each in own] for name, own in ratios.items()},
    }


def cost(steps: float, ratios: Sequence[float], block: int) -> float:
    """Return what so many steps from the first one cost, in steps of the reference."""
    late = ratios[EARLY:] or ratios[-1:]
    total = 0.0
    for ratio in ratios:
        taken = min(steps, block)
        total, steps = total + taken * ratio, steps - taken
    return total + steps * sum(late) / len(late)


def steps_within(budget: float, ratios: Sequence[float], block: int) -> float:
    """Return how many steps cost so much: the inverse of `cost`."""
    low, high = 0.0, 2 * budget / min(ratios) + 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle, ratios, block) < budget else (low, middle)
    return low


def memory(task: str, methods: Sequence[str]) -> dict[str, int]:
    """Return the peak of resident memory in bytes above data and libraries, each method in a process of its own."""
    TASKS[task].data()
    import_all()
    context, found = get_context("fork"), defaultdict[str, int](int)
    for method in methods:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_measure, args=(task, method, theirs))
        process.start()
        theirs.close()
        found[method] = ours.recv()
        process.join()
    return dict(found)


def _measure(task: str, method: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    before = resident_memory()

    def run() -> None:
        training = Training(usual(task, method))
        for _ in range(MEMORY_STEPS):
            training.step()

    answer.send(peak_memory(run) - before)


def import_all() -> None:
    """Load the libraries that some methods load when they are first used."""
    import pytorch_optimizer  # noqa: F401, PLC0415

    import natgrad  # noqa: PLC0415

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    for name in ("NaturalMuon", "KFAC", "EKFAC"):
        getattr(natgrad, name)
