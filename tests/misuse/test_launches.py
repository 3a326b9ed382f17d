"""A launcher that has started several ranks without a process group: they would drift apart."""

import pytest
import torch

import natgrad


def test_several_ranks_without_a_process_group_are_warned_of(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(natgrad.NatgradWarning, match="^natgrad: WORLD_SIZE=2 .*init_process_group"):
        natgrad.Preconditioner(torch.nn.Linear(3, 2))


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
@pytest.mark.parametrize("ranks", ["1", ""])
def test_a_single_process_is_not(monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    natgrad.Preconditioner(torch.nn.Linear(3, 2))
