"""Trains a tiny language model with ``transformers.Trainer``; also as a job of several ranks."""

import os
import sys
import warnings
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from natgrad.integrations.transformers import NatgradCallback, OptimizerFactory
from tests.integrations.launch import OPTIMIZERS, cases, write

VOCABULARY, LENGTH = 32, 8


def samples(count=96):
    """Return token sequences; the first positions of the labels are masked, in each sequence another number."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    masked = torch.arange(LENGTH) < torch.randint(LENGTH - 2, (count, 1), generator=generator)
    labels = tokens.masked_fill(masked, -100)
    return [{"input_ids": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]


def model(dtype=torch.float64):
    """Return a Llama of two small layers. (GPT-2 looks its positions up once for all samples of a batch.)"""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype)


def trained(
    folder, optimizer, *, batch=4, steps=8, resume=None, dtype=torch.float64, scaler=None, evaluates=False, **arguments
):
    """Train; return the trainer. `scaler`: as a GPU's fp16 has one; Accelerate makes none on CPUs."""
    arguments = {"max_grad_norm": 0.0, "save_steps": 4, "logging_steps": 4, "report_to": [], **arguments}
    if "RANK" in os.environ:
        arguments["ddp_backend"] = "gloo"
    trainer = Trainer(
        model(dtype),
        TrainingArguments(
            str(folder),
            use_cpu=True,
            per_device_train_batch_size=batch,
            max_steps=steps,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=samples(),
        eval_dataset=samples(8) if evaluates else None,
        optimizer_cls_and_kwargs=(OptimizerFactory, dict(optimizer)),
        callbacks=[NatgradCallback()],
    )
    trainer.accelerator.scaler = scaler
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def weights(trainer):
    """Return all weights in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).double()


# When rank 0 saves: "best" decides after an evaluation. A resumed run starts from the first checkpoint.
SAVING = {
    "steps": {},
    "epoch": {"save_strategy": "epoch"},
    "best": {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"},
}


def main(folder):
    """Train with each optimizer and placement, resume, and write the weights."""
    found = {}
    for name, chosen in SAVING.items():
        out, options = folder / name, {**OPTIMIZERS["muon"], "placement": "mem-opt"}
        arguments = {**chosen, "steps": 16 if name == "epoch" else 8, "evaluates": name == "best"}
        whole = trained(out, options, **arguments)
        first = min(out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        again = trained(out, options, resume=first, **arguments)
        found[f"saving {name}"] = torch.equal(weights(whole), weights(again))
    for key, options in cases():
        found[key] = weights(trained(folder / key, options)).tolist()
        again = trained(folder / key, options, resume=folder / key / "checkpoint-4")
        found[f"{key} resumed"] = weights(again).tolist()
    write(folder, found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
