"""What the frameworks' tests share: optimizers, data with masked tokens, and jobs on ranks of their own.

A job runs as under torchrun: each rank is a new process with the usual variables.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn import functional

LIMIT = 240
OPTIMIZERS = {
    "muon": {"name": "natural-muon", "lr": 1e-2},
    "kfac": {"name": "sgd+kfac", "lr": 1e-2, "momentum": 0.9},
}
PLACEMENTS = ("comm-opt", "mem-opt")
WHOLE, LENGTH, FEATURES, CLASSES = 8, 5, 8, 4  # samples of a step, and their tokens


def cases():
    """Yield the key and the options of each optimizer with each placement."""
    for (name, options), placement in itertools.product(OPTIMIZERS.items(), PLACEMENTS):
        yield f"{name} {placement}", {**options, "placement": placement}


def tokens(steps):
    """Return inputs ``[steps, WHOLE, LENGTH, FEATURES]`` and labels, in each sample another number of them masked."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, WHOLE, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (steps, WHOLE, LENGTH), generator=generator)
    masked = torch.arange(LENGTH) < torch.randint(LENGTH, (steps, WHOLE, 1), generator=generator)
    return inputs, labels.masked_fill(masked, -100)


def share_of_loss(outputs, labels, whole, passes):
    """Return the loss of samples of a step, whose labels are `whole`, for a framework that averages over its passes."""
    total = functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")
    return total * passes / (whole != -100).sum()


def write(folder, found):
    """Write what a rank has found, for `launch`."""
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def assert_same(numbers, expected):
    """Assert that the weights of a rank, from its file, are those of one process."""
    torch.testing.assert_close(torch.tensor(numbers, dtype=torch.float64), expected, rtol=1e-6, atol=1e-8)


def launch(job: str, ranks: int, folder: Path, *arguments: str) -> list[dict]:
    """Run ``python -m tests.integrations.JOB FOLDER ...`` on so many ranks; return what each writes as JSON."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = []
    for rank in range(ranks):
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        group |= {
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "HF_HUB_OFFLINE": 1,
        }
        environment = {**os.environ, **{name: str(value) for name, value in group.items()}}
        command = [sys.executable, "-m", f"tests.integrations.{job}", str(folder), *arguments]
        with (folder / f"rank-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [(folder / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    assert not any(codes), "\n".join(log[-3000:] for log in logs)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
