"""Under torchrun's elastic agent a run continues from its last checkpoint with fewer or more ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from natgrad.cli import app
from natgrad.training.job import Job
from natgrad.training.result import read_points
from natgrad.training.run import Output, read_job, train

SECONDS = 240.0
QUICK = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def agent(folder, port, ranks, number, *options, nodes="1:2"):
    """An agent, which stands for a machine, with its ranks; the first one hosts the rendezvous."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"),
        *(
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            f"--rdzv-conf={QUICK},is_host={number == 0}",
        ),
        *("--rdzv-id=elastic", "--local-addr=127.0.0.1", "--monitor-interval=0.1"),
        *("-m", "natgrad.cli", "train", "tabular", "--epochs=100000", f"--out={folder / 'run'}"),
        *("--checkpoint-seconds=0", "--curvature=kfac", *options),
    ]
    # Without the last variable an agent that joins a run waits forever for the address of rank 0 (torch 2.13).
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, **environment}
    with (folder / f"{number}.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            yield process
        finally:
            kill(process)


def kill(process):
    """Kill an agent and its ranks, which have process groups of their own."""
    found = subprocess.run(["ps", "-s", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=False)
    for number in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
    process.wait()


def wait_for(folder, workers, lines, processes):
    """Wait until a run on so many ranks has written more lines of metrics, and return its points."""
    metrics, ends, seen = folder / "run" / "metrics.jsonl", time.monotonic() + SECONDS, None
    while time.monotonic() < ends and all(process.poll() is None for process in processes):
        if metrics.exists() and read_job(folder / "run").workers == workers:
            points = read_points(metrics)
            seen = len(points) if seen is None else seen
            if len(points) >= seen + lines:
                return points
        time.sleep(0.05)
    raise AssertionError("\n".join(path.read_text()[-3000:] for path in folder.glob("*.txt")))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4)])
def test_an_elastic_restart_with_another_number_of_ranks(tmp_path, before, after):
    """Agents with one rank each, of which one is killed; or an agent with two ranks, which another one joins."""
    port, ranks = free_port(), max(1, after // 2)
    with ExitStack() as stack:
        agents = [stack.enter_context(agent(tmp_path, port, ranks, number)) for number in range(before // ranks)]
        reported = wait_for(tmp_path, before, 5, agents)
        if after < before:
            kill(agents.pop())
        else:
            agents.append(stack.enter_context(agent(tmp_path, port, ranks, 1)))
        points = wait_for(tmp_path, after, 5, agents)
    assert [point.epoch for point in points] == list(range(1, len(points) + 1))
    assert points[: len(reported)] == reported
    assert points[-1].loss < points[0].loss


@pytest.mark.slow
def test_daso_goes_on_with_fewer_nodes_and_with_one_that_comes_back(tmp_path):
    """Without a warm-up, so that nodes differ between two averages, where one that joins stops them."""
    port, options = free_port(), ("--averaging=daso", "--batch-size=60", "--warmup-epochs=0")
    with ExitStack() as stack:
        agents = [stack.enter_context(agent(tmp_path, port, 1, number, *options, nodes="2:3")) for number in range(3)]
        reported = wait_for(tmp_path, 3, 5, agents)
        kill(agents.pop())
        fewer = wait_for(tmp_path, 2, 5, agents)
        agents.append(stack.enter_context(agent(tmp_path, port, 1, 2, *options, nodes="2:3")))
        points = wait_for(tmp_path, 3, 5, agents)
    assert [point.epoch for point in points] == list(range(1, len(points) + 1))
    assert points[: len(reported)] == reported
    assert points[: len(fewer)] == fewer
    assert [each[-1].averaging["nodes"] for each in (reported, fewer, points)] == ["3 nodes", "2 nodes", "3 nodes"]
    assert points[-1].averaging["phase"] == "cycling"


def test_a_command_that_torchrun_restarts_resumes(tmp_path, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = Job(task="tabular", epochs=1)
    train(job, Output(folder=tmp_path / "run"))
    with pytest.raises(ValueError, match="must be a folder without a run"):
        train(replace(job, epochs=2), Output(folder=tmp_path / "run"))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    points = train(replace(job, epochs=2), Output(folder=tmp_path / "run")).points
    assert [point.epoch for point in points] == [1, 2]


def test_a_run_with_daso_that_lost_all_nodes_but_one_names_its_checkpoint(tmp_path, monkeypatch):
    """It starts again on one node, where DASO has nothing to average, and says what goes on from where."""
    folder = tmp_path / "run"
    train(Job(task="tabular", averaging="daso", nodes=2, workers=2, epochs=1), Output(folder=folder))
    before = (folder / "config.json").read_bytes()
    port = str(free_port())
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": port, "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(name, value)
    for arguments in (("tabular", "--averaging", "daso", "--epochs", "1", "--out"), ("--resume",)):
        done = CliRunner().invoke(app, ["train", *arguments, str(folder)])
        assert done.exit_code == 2, done.output
        assert done.stderr.count("\n") == 1
        assert "--nodes=1 is not allowed: --nodes must be at least 2" in done.stderr
        assert f"to continue from {folder / 'checkpoints' / 'step-000000007'}" in done.stderr
        assert (folder / "config.json").read_bytes() == before
