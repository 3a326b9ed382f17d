"""The text is the library's own, split by file, and the model looks only backwards."""

import sysconfig
from pathlib import Path

import pytest
import torch

from natgrad import tasks
from natgrad.errors import NatgradError
from natgrad.tasks import text


def test_files_are_split_between_training_and_testing() -> None:
    train, test = text.sources()
    assert not set(train) & set(test)
    assert len(train) > 5 * len(test)
    assert sorted(train + test) == sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def test_windows_are_pieces_of_the_files_with_targets_one_byte_on(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_bytes(bytes(range(100)))
    second.write_bytes(bytes(range(100, 256)))
    inputs, targets = text.windows([first, second], count=6, context=16).tensors
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(16))
    assert inputs[0, 0] == 0
    assert targets[-1, -1] == 255
    with pytest.raises(ValueError, match=r"context=256.*256 bytes"):
        text.windows([first, second], count=6, context=256)


def test_a_byte_changes_no_logits_before_it() -> None:
    torch.manual_seed(0)
    model = tasks.get("text", width=32, context=16).model()
    inputs = torch.randint(256, (2, 16))
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 0


def test_attention_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    attention = text.Attention(width=6, heads=2)
    inputs = torch.randn(1, 5, 6)
    query, key, value = (layer(inputs).view(5, 2, 3) for layer in (attention.query, attention.key, attention.value))
    scores = torch.einsum("thd,shd->hts", query, key) / 3**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), value)
    torch.testing.assert_close(attention(inputs)[0], attention.output(mixed.reshape(5, 6)))


def test_a_python_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(NatgradError, match="standard library"):
        text.sources()
