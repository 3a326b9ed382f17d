"""A launcher that has started several ranks without a process group: they would drift apart."""

import pytest
import torch

import natgrad


def test_several_ranks_without_a_process_group_are_warned_of(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = torch.nn.Linear(3, 2)
    preconditioner = natgrad.Preconditioner(model)  # a trainer may initialise torch.distributed after it
    model(torch.ones(4, 3)).sum().backward()
    with pytest.warns(natgrad.NatgradWarning, match="^natgrad: WORLD_SIZE=2 .*init_process_group"):
        preconditioner.step()


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
@pytest.mark.parametrize("ranks", ["1", ""])
def test_a_single_process_is_not(monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    model = torch.nn.Linear(3, 2)
    preconditioner = natgrad.Preconditioner(model)
    model(torch.ones(4, 3)).sum().backward()
    preconditioner.step()
