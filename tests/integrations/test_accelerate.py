"""natgrad in a training loop of Accelerate."""

import pytest
import torch

pytest.importorskip("accelerate")

from tests.integrations.accelerate_job import trained
from tests.integrations.launch import OPTIMIZERS, PLACEMENTS, assert_same

JOB = "accelerate_job"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
class TestTwoRanks:
    @pytest.mark.parametrize("how", ["", " prepared first", " parts", " sharded", " sharded parts"])
    def test_equal_one_process(self, on_two_ranks, name, placement, how):
        expected = trained(OPTIMIZERS[name])
        for found in on_two_ranks:
            assert_same(found[f"{name} {placement}{how}"], expected)

    @pytest.mark.parametrize("how", ["", " sharded"])
    def test_resume_exactly(self, on_two_ranks, name, placement, how):
        for found in on_two_ranks:
            assert found[f"{name} {placement}{how} resumed"] == found[f"{name} {placement}{how}"]


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestOneProcess:
    def test_resumes_exactly(self, tmp_path, name):
        whole = trained(OPTIMIZERS[name], folder=tmp_path)
        assert trained(OPTIMIZERS[name], folder=tmp_path, resume=True).equal(whole)

    def test_accumulation_equals_one_batch(self, name):
        found, expected = trained(OPTIMIZERS[name], parts=2), trained(OPTIMIZERS[name])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)

    def test_loss_scaling_changes_nothing(self, name):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        found = trained(OPTIMIZERS[name], scaler=scaler)
        assert scaler.get_scale() > 1024.0
        torch.testing.assert_close(found, trained(OPTIMIZERS[name]))

    def test_bfloat16_is_close(self, name):
        found, expected = trained(OPTIMIZERS[name], mixed_precision="bf16"), trained(OPTIMIZERS[name])
        assert (found - expected).norm() < 0.02 * expected.norm()
