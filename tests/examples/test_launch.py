"""The training script for launchers finds its rank in the variables of each, and all ranks train as one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "launch" / "launch.py"
VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
    "open-mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
}


@pytest.mark.parametrize("launcher", VARIABLES)
def test_two_ranks_learn(launcher):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = []
    for rank in range(2):
        names = dict(zip(VARIABLES[launcher], (str(rank), "2"), strict=True))
        environment = {**os.environ, **names, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPT)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    first, second = (process.communicate(timeout=240)[0] for process in processes)
    assert not any(process.returncode for process in processes)
    losses = [float(line.split()[4]) for line in first.splitlines() if line.endswith("on 2 ranks")]
    assert losses[-1] < losses[0]
    assert not second
