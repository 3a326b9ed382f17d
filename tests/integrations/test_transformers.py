"""natgrad inside ``transformers.Trainer``."""

import importlib
import sys
import warnings
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Trainer, TrainingArguments

import natgrad
from natgrad.integrations.transformers import NatgradCallback
from tests.integrations.launch import OPTIMIZERS, PLACEMENTS, assert_same
from tests.integrations.trainer_job import SAVING, model, samples, trained, weights

JOB = "trainer_job"
MUON, KFAC = OPTIMIZERS.values()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
class TestTwoRanks:
    def test_equal_one_process(self, on_two_ranks, name, placement, tmp_path):
        expected = weights(trained(tmp_path, OPTIMIZERS[name], batch=8))
        for found in on_two_ranks:
            assert_same(found[f"{name} {placement}"], expected)

    def test_resume_exactly(self, on_two_ranks, name, placement):
        for found in on_two_ranks:
            assert found[f"{name} {placement} resumed"] == found[f"{name} {placement}"]


@pytest.mark.parametrize("when", SAVING)
def test_one_rank_saves_all_whenever_it_saves(on_two_ranks, when):
    assert all(found[f"saving {when}"] for found in on_two_ranks)


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestOneProcess:
    def test_resumes_exactly(self, tmp_path, name):
        whole = trained(tmp_path, OPTIMIZERS[name])
        again = trained(tmp_path, OPTIMIZERS[name], resume=tmp_path / "checkpoint-4")
        assert weights(again).equal(weights(whole))

    def test_loss_scaling_changes_nothing(self, tmp_path, name):
        expected = weights(trained(tmp_path, OPTIMIZERS[name]))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        found = weights(trained(tmp_path, OPTIMIZERS[name], scaler=scaler))
        assert scaler.get_scale() > 1024.0
        torch.testing.assert_close(found, expected)

    def test_trains_in_bfloat16(self, tmp_path, name):
        trainer = trained(tmp_path, OPTIMIZERS[name], dtype=torch.float32, bf16=True, steps=40, logging_steps=10)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert losses[-1] < losses[0]

    def test_logs_its_share_of_the_time(self, tmp_path, name):
        trainer = trained(tmp_path, OPTIMIZERS[name])
        shares = [row["natgrad_overhead"] for row in trainer.state.log_history if "loss" in row]
        assert shares
        assert all(share >= 0 for share in shares)

    def test_accumulation_equals_one_batch(self, tmp_path, name):
        expected = weights(trained(tmp_path, OPTIMIZERS[name], batch=8))
        found = weights(trained(tmp_path, OPTIMIZERS[name], batch=4, gradient_accumulation_steps=2))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


class TestClipping:
    def test_of_the_trainer_is_warned_of_beside_another_optimizer(self, tmp_path):
        with pytest.warns(natgrad.NatgradWarning, match=r"clips gradients to 1 .* Pass max_grad_norm=0"):
            trained(tmp_path, KFAC, steps=1, max_grad_norm=1.0)

    def test_of_the_trainer_suits_natural_muon(self, tmp_path):
        expected = weights(trained(tmp_path, {**MUON, "clip_norm": 0.1}))
        torch.testing.assert_close(weights(trained(tmp_path, MUON, max_grad_norm=0.1)), expected)


def test_a_scaler_of_the_user_stays(tmp_path):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer = trained(tmp_path, {**KFAC, "scaler": scaler}, steps=1)
    assert trainer.optimizer.optimizer.preconditioner.scaler is scaler


def test_another_optimizer_is_warned_of(tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[])
    trainer = Trainer(model(), arguments, train_dataset=samples(), callbacks=[NatgradCallback()])
    with pytest.warns(natgrad.NatgradWarning, match="the trainer's optimizer is AdamW, not one of natgrad's: pass"):
        trainer.train()


def test_a_weight_decay_that_is_not_used_is_warned_of(tmp_path):
    with pytest.warns(natgrad.NatgradWarning, match=r"weight_decay=0\.1 of the TrainingArguments is not used"):
        trained(tmp_path, MUON, steps=1, weight_decay=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"learning_rate": 1e-3}, r"learning_rate=0\.001 of the TrainingArguments is not used: pass lr to natgrad"),
        ({"optim": "adafactor"}, r"optim='adafactor' of the TrainingArguments is not used: pass name to natgrad"),
    ],
)
def test_a_learning_rate_or_optimizer_that_is_not_used_is_warned_of(tmp_path, arguments, said):
    with pytest.warns(natgrad.NatgradWarning, match=said):
        trained(tmp_path, MUON, steps=1, **arguments)


def test_the_learning_rate_of_natgrad_is_silent_in_the_arguments(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", natgrad.NatgradWarning)
        trainer = trained(tmp_path, MUON, steps=1, learning_rate=MUON["lr"], warmup_steps=2)
    assert trainer.state.global_step == 1


def test_an_older_version_is_named(monkeypatch):
    older = ModuleType("transformers")
    older.__version__ = "4.57.6"
    for name in ("TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments"):
        setattr(older, name, object)
    monkeypatch.setitem(sys.modules, "transformers", older)
    monkeypatch.delitem(sys.modules, "natgrad.integrations.transformers")
    with pytest.raises(ImportError, match=r"needs transformers 5\.2 or later: .* 4\.57\.6 is installed"):
        importlib.import_module("natgrad.integrations.transformers")
