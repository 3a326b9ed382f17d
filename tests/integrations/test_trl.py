"""natgrad inside TRL's ``SFTTrainer``, which masks prompts. Not installed by any target: run it where trl is."""

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from natgrad.integrations.transformers import NatgradCallback, OptimizerFactory
from tests.integrations.launch import OPTIMIZERS
from tests.integrations.trainer_job import VOCABULARY, model

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(VOCABULARY - 3))]


def tokenizer():
    whole = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def samples():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(64):
        prompt = torch.randint(3, VOCABULARY, (4,), generator=generator)
        length = int(torch.randint(2, 8, (1,), generator=generator))
        rows.append({"prompt": " ".join(WORDS[i] for i in prompt), "completion": " " + " ".join(WORDS[3 : 3 + length])})
    return Dataset.from_list(rows)


@pytest.mark.filterwarnings("ignore:natgrad has no curvature for lm_head")  # the trainer does not call the head
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learns(tmp_path, name):
    arguments = SFTConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=5,
        report_to=[],
        max_grad_norm=0.0,
        save_strategy="no",
    )
    trainer = SFTTrainer(
        model(torch.float32),
        args=arguments,
        train_dataset=samples(),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(OptimizerFactory, dict(OPTIMIZERS[name])),
        callbacks=[NatgradCallback()],
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
