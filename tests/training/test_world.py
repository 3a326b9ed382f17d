import pytest
import torch

from natgrad.training.averaging import describe, machines
from natgrad.training.world import check_devices


@pytest.mark.parametrize(
    ("gpus", "device", "workers", "named"),
    [(0, "cuda", 1, "device='cuda'"), (1, "cuda", 2, "workers=2"), (1, "auto", 2, "workers=2")],
)
def test_a_rank_without_a_device_is_refused(monkeypatch, gpus, device, workers, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=named):
        check_devices(device, workers)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (0, "auto"), (1, "cpu"), (2, "cuda"), (2, "auto")])
def test_ranks_with_a_device_each_may_start(monkeypatch, gpus, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert check_devices(device, 2) is None


def test_nodes_beyond_the_machines_are_called_emulated(monkeypatch):
    assert machines(4) == 1
    assert describe(2, 4) == "2 emulated nodes"
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert machines(4) == 2
    assert describe(2, 4) == "2 nodes"
    assert describe(4, 4) == "4 emulated nodes"
