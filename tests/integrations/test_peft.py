"""natgrad trains the adapters of PEFT, and nothing else."""

from copy import deepcopy

import pytest
import torch

pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import natgrad

KINDS = {"lora": {}, "dora": {"use_dora": True}}
OPTIMIZERS = {"natural-muon": {"lr": 1e-2}, "adamw+kfac": {"lr": 1e-3}}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def plain(width=32):
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).double()


def adapted(model, **options):
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, **options)).double()


def train(model, optimizer, steps=range(6)):
    """Train; return the losses."""
    losses = []
    for step in steps:
        tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step % 2))
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def numbers(state):
    """Return the number of elements of all tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(numbers, parts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
class TestAdapters:
    def test_alone_are_trained_and_saved(self, name, kind):
        model = adapted(plain(), **KINDS[kind])
        frozen = {key: one.clone() for key, one in model.named_parameters() if not one.requires_grad}
        optimizer = natgrad.create_optimizer(model, name, **OPTIMIZERS[name])
        losses = train(model, optimizer)
        assert losses[-1] < losses[0]
        assert all(one.equal(frozen[key]) for key, one in model.named_parameters() if key in frozen)
        assert all("lora_" in key for key in optimizer.state_dict()["preconditioner"]["blocks"])

    def test_injected_later_train_as_if_before(self, name, kind):
        model = adapted(plain(), **KINDS[kind])
        expected = train(model, natgrad.create_optimizer(model, name, **OPTIMIZERS[name]))
        base = plain()
        optimizer = natgrad.create_optimizer(base, name, **OPTIMIZERS[name])
        assert train(adapted(base, **KINDS[kind]), optimizer) == pytest.approx(expected, rel=1e-9)

    def test_resume_exactly(self, name, kind):
        model = adapted(plain(), **KINDS[kind])
        optimizer = natgrad.create_optimizer(model, name, **OPTIMIZERS[name])
        train(model, optimizer, range(3))
        weights = {key: one.clone() for key, one in model.state_dict().items()}
        state = deepcopy(optimizer.state_dict())  # torch's holds the tensors that training changes
        expected = train(model, optimizer, range(3, 6))
        other = adapted(plain(), **KINDS[kind])
        other.load_state_dict(weights)
        again = natgrad.create_optimizer(other, name, **OPTIMIZERS[name])
        again.load_state_dict(state)
        assert train(other, again, range(3, 6)) == expected

    def test_merge_after_training(self, name, kind):
        model = adapted(plain(), **KINDS[kind])
        train(model, natgrad.create_optimizer(model, name, **OPTIMIZERS[name]))
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            expected = model(input_ids=tokens).logits
            torch.testing.assert_close(model.merge_and_unload()(input_ids=tokens).logits, expected)


def test_natural_muon_keeps_less_than_adamw_for_wide_adapters():
    model = adapted(plain(width=512))
    optimizer = natgrad.create_optimizer(model, "natural-muon", lr=1e-2)
    train(model, optimizer, range(1))
    adapter = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert numbers(optimizer.state_dict()) < 2 * adapter
