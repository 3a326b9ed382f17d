"""The versions and devices of a machine, and a self-check that takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessContext, start_processes
from torch.nn.functional import mse_loss

from natgrad import NaturalMuon, Preconditioner

_RANKS = 2
_STEPS = 20
_SECONDS = 60.0
_TOLERANCE = 1e-3  # relative, in float32


def describe() -> dict[str, str]:
    """Return versions, devices, backends and extras as text."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("natgrad", "torch", "numpy"))
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    devices = [f"cpu ({os.cpu_count()} cores)", *(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)]
    return {
        "versions": f"{packages}, python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "devices": ", ".join(devices),
        "backends": ", ".join(_backends()) or "none: torch was built without torch.distributed",
        **_extras(),
    }


def check() -> Iterator[tuple[str, str]]:
    """Check that natgrad trains on each device, and on two ranks. Yield the name and the error of each check.

    The error is empty if the check has passed.
    """
    multiprocessing.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for backend in _backends():
            if backend == "gloo" or torch.cuda.device_count() >= _RANKS:
                arguments = (backend, str(Path(folder, backend)))  # they start while this process goes on
                started[backend] = start_processes(_run_rank, arguments, _RANKS, join=False, start_method="forkserver")
        for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
            yield f"natural Muon trains on {device}", _train(device)
        for backend, ranks in started.items():
            yield f"K-FAC on {_RANKS} ranks over {backend} equals one process", _wait_for(ranks)


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, is_there in available.items() if is_there]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


_OF_DEVELOPERS = ("dev", "docs", "integrations")


def _extras() -> dict[str, str]:
    """Return what each extra of natgrad lacks, as text; the versions of packages are not compared."""
    wanted: dict[str, list[str]] = {}
    for requirement in (requires("natgrad") or []) if _version("natgrad") else []:
        found = re.match(r"([\w.-]+)(\[[\w,-]+\])?.*;.*\bextra == ['\"]([\w-]+)['\"]", requirement)
        if (
            found
            and found[1] != "natgrad"
            and found[3] not in _OF_DEVELOPERS
            and not ("python_version <" in requirement and sys.version_info >= (3, 11))
        ):
            wanted.setdefault(found[3], []).append(found[1])
    lacking = {extra: [name for name in names if not _version(name)] for extra, names in wanted.items()}
    return {f"[{extra}]": f"lacks {', '.join(names)}" if names else "installed" for extra, names in lacking.items()}


def _network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def _train(device: str) -> str:
    """Train on a device and return what is wrong; empty: the loss has fallen to less than half."""
    try:
        model, target = _network().to(device), _network(1).to(device)
        inputs = torch.randn(64, 8, device=device)
        optimizer, losses = NaturalMuon(model), list[float]()
        for _ in range(_STEPS):
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), target(inputs).detach())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except Exception as error:  # whatever is wrong with the machine
        return f"{type(error).__name__}: {error}"
    return "" if losses[-1] < 0.5 * losses[0] else f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}"


def _wait_for(ranks: ProcessContext) -> str:
    """Return what is wrong with the ranks; empty: nothing."""
    end = time.monotonic() + _SECONDS
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > end:
                return f"no result after {_SECONDS:.0f} s"
    except Exception as error:
        return str(error).strip().splitlines()[-1]
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
    return ""


def _run_rank(rank: int, backend: str, rendezvous: str) -> None:
    """Compare a step on this rank's half of a batch with that of one process.

    Raises:
        RuntimeError: They differ.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=_RANKS)
    preconditioner = Preconditioner(_network().to(device), "kfac", gradients="reduce")
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(rank)).to(device)

    def loss_of(network: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = network(batch).square().mean()
        return loss

    worst = preconditioner.verify(inputs, loss_of).worst
    dist.destroy_process_group()
    if not worst < _TOLERANCE:
        raise RuntimeError(f"the relative difference is {worst:.1e}, above {_TOLERANCE:g}")
