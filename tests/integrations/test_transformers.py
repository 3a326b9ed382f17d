"""natgrad inside ``transformers.Trainer``."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.launch import launch
from tests.integrations.trainer_job import KFAC, MUON, trained, weights

OPTIMIZERS = {"muon": MUON, "kfac": KFAC}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return launch("trainer_job", 2, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
@pytest.mark.parametrize("name", OPTIMIZERS)
class TestTwoRanks:
    def test_equal_one_process(self, on_two_ranks, name, placement, tmp_path):
        expected = weights(trained(tmp_path, OPTIMIZERS[name], batch=8))
        for found in on_two_ranks:
            numbers = torch.tensor(found[f"{name} {placement}"], dtype=torch.float64)
            torch.testing.assert_close(numbers, expected, rtol=1e-6, atol=1e-8)

    def test_resume_exactly(self, on_two_ranks, name, placement):
        for found in on_two_ranks:
            assert found[f"{name} {placement} resumed"] == found[f"{name} {placement}"]


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestOneProcess:
    def test_resumes_exactly(self, tmp_path, name):
        whole = trained(tmp_path, OPTIMIZERS[name])
        again = trained(tmp_path, OPTIMIZERS[name], resume=tmp_path / "checkpoint-4")
        assert weights(again).equal(weights(whole))

    def test_accumulation_equals_one_batch(self, tmp_path, name):
        expected = weights(trained(tmp_path, OPTIMIZERS[name], batch=8))
        found = weights(trained(tmp_path, OPTIMIZERS[name], batch=4, gradient_accumulation_steps=2))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
