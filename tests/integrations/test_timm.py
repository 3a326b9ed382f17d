"""natgrad with timm's models, scheduler and average of weights."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("timm")

import timm
from timm.optim import optimizer_kwargs
from timm.utils import NativeScaler

from natgrad.integrations.timm import create_optimizer_v2
from tests.integrations.launch import OPTIMIZERS, PLACEMENTS, assert_same
from tests.integrations.timm_job import trained

JOB = "timm_job"
MUON = OPTIMIZERS["muon"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
class TestTwoRanks:
    def test_equal_one_process(self, on_two_ranks, name, placement):
        expected, _, _ = trained(OPTIMIZERS[name])
        for found in on_two_ranks:
            assert_same(found[f"{name} {placement}"], expected)

    def test_resume_exactly(self, on_two_ranks, name, placement):
        assert all(found[f"{name} {placement} resumed"] for found in on_two_ranks)


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestOneProcess:
    def test_resumes_exactly(self, name):
        whole, average, _ = trained(OPTIMIZERS[name])
        again, other, _ = trained(OPTIMIZERS[name], state=trained(OPTIMIZERS[name], stop=3)[2])
        assert again.equal(whole)
        assert other.equal(average)

    def test_accumulation_equals_one_batch(self, name):
        found, expected = trained(OPTIMIZERS[name], parts=2)[0], trained(OPTIMIZERS[name])[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)

    def test_loss_scaling_changes_nothing(self, name):
        expected, _, _ = trained(OPTIMIZERS[name], parts=2)
        found, _, _ = trained(OPTIMIZERS[name], parts=2, scaler=NativeScaler("cpu"))
        torch.testing.assert_close(found, expected)

    def test_bfloat16_is_close(self, name):
        found, expected = trained(OPTIMIZERS[name], narrow=True)[0], trained(OPTIMIZERS[name])[0]
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_clipping_of_timm_suits_natural_muon():
    found, _, _ = trained(MUON, scaler=NativeScaler("cpu"), clip=0.1)
    expected, _, _ = trained({**MUON, "clip_norm": 0.1})
    torch.testing.assert_close(found, expected)


def test_biases_and_norms_are_not_decayed():
    model = timm.create_model("test_vit", num_classes=4)
    optimizer = create_optimizer_v2(model, "natural-muon", lr=1e-2, weight_decay=0.05)
    decayed = {id(one) for group in optimizer.param_groups if group["weight_decay"] for one in group["params"]}
    names = {name for name, one in model.named_parameters() if id(one) in decayed}
    assert "blocks.0.mlp.fc1.weight" in names
    assert not any(name.endswith("bias") or "norm" in name for name in names)


def test_takes_the_arguments_of_timms_script():
    parsed = {"opt": "natural-muon", "lr": 1e-2, "weight_decay": 0.05, "momentum": 0.9, "layer_decay": None}
    arguments = SimpleNamespace(**parsed, layer_decay_min_scale=0, layer_decay_no_opt_scale=None)
    model = timm.create_model("test_vit")
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=arguments))
    decayed = {id(one) for group in optimizer.param_groups if group["weight_decay"] for one in group["params"]}
    exempt = model.no_weight_decay()
    assert exempt
    assert not any(id(one) in decayed for name, one in model.named_parameters() if name in exempt)


def test_layer_decay_is_refused():
    with pytest.raises(ValueError, match=r"layer_decay=True is not allowed: layer_decay must be left out"):
        create_optimizer_v2(timm.create_model("test_vit"), "natural-muon", layer_decay=0.7)
