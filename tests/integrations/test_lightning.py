"""natgrad inside ``lightning.Trainer``."""

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision

from tests.integrations.launch import OPTIMIZERS, PLACEMENTS, assert_same
from tests.integrations.lightning_job import trained, weights

JOB = "lightning_job"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
class TestTwoRanks:
    def test_equal_one_process(self, on_two_ranks, name, placement, tmp_path):
        expected = weights(trained(tmp_path, OPTIMIZERS[name]))
        for found in on_two_ranks:
            assert_same(found[f"{name} {placement}"], expected)

    def test_resume_exactly(self, on_two_ranks, name, placement):
        for found in on_two_ranks:
            assert found[f"{name} {placement} resumed"] == found[f"{name} {placement}"]


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestOneProcess:
    def test_resumes_exactly(self, tmp_path, name):
        whole = trained(tmp_path, OPTIMIZERS[name])
        again = trained(tmp_path, OPTIMIZERS[name], resume=tmp_path / "step=4.ckpt")
        assert weights(again).equal(weights(whole))

    def test_accumulation_equals_one_batch(self, tmp_path, name):
        expected = weights(trained(tmp_path / "whole", OPTIMIZERS[name]))
        found = weights(trained(tmp_path / "parts", OPTIMIZERS[name], batch=4, accumulate_grad_batches=2))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)

    def test_loss_scaling_changes_nothing(self, tmp_path, name):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        found = trained(tmp_path / "scaled", {**OPTIMIZERS[name], "scaler": scaler}, precision=None, plugins=plugins)
        assert scaler.get_scale() > 1024.0
        expected = weights(trained(tmp_path / "plain", OPTIMIZERS[name]))
        assert (weights(found) - expected).norm() < 0.02 * expected.norm()

    def test_bfloat16_is_close(self, tmp_path, name):
        found = weights(trained(tmp_path / "narrow", OPTIMIZERS[name], precision="bf16-mixed"))
        expected = weights(trained(tmp_path / "plain", OPTIMIZERS[name]))
        assert (found - expected).norm() < 0.02 * expected.norm()

    def test_clipping(self, tmp_path, name):
        options = {**OPTIMIZERS[name], "clip_norm": 0.1}
        expected = weights(trained(tmp_path / "ours", options))
        if name == "muon":
            found = weights(trained(tmp_path / "theirs", OPTIMIZERS[name], gradient_clip_val=0.1))
            torch.testing.assert_close(found, expected)
        else:
            assert not expected.equal(weights(trained(tmp_path / "none", OPTIMIZERS[name])))
