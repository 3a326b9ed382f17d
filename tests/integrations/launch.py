"""Runs a job of a framework on ranks of its own, as torchrun does: each a new process with the usual variables."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

LIMIT = 240


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
