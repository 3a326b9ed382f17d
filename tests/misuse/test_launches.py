"""A launcher that has started several ranks without a process group: they would drift apart."""

import pytest
import torch

import natgrad

NAMES = (
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "WORLD_SIZE",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
)


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


def build():
    return natgrad.Preconditioner(torch.nn.Linear(3, 2))


@pytest.mark.parametrize(
    "variables",
    [
        {"HOROVOD_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "2"},
        {"WORLD_SIZE": "2"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_several_ranks_without_a_process_group_are_warned_of(environment, variables):
    environment(**variables)
    with pytest.warns(natgrad.NatgradWarning, match=f"^natgrad: {next(iter(variables))}=2 .*init_process_group"):
        build()


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HOROVOD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8"},  # an allocation, not a task of it
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # a shell within the allocation
        {"WORLD_SIZE": ""},
    ],
)
def test_a_single_process_is_not(environment, variables):
    environment(**variables)
    build()
