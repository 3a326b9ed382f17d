"""The code in docs/integrations runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import natgrad

PAGES = Path(__file__).parents[2] / "docs" / "integrations"
NEEDED = {
    "transformers": ["transformers"],
    "Accelerate": ["accelerate"],
    "Lightning": ["lightning"],
    "timm": ["timm"],
    "PEFT": ["peft", "transformers"],
}


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def loader():
    return DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(4, (16,))), 4)


def names(section, folder):
    """Return what the code of a section uses."""
    found = {"natgrad": natgrad, "torch": torch, "criterion": nn.CrossEntropyLoss()}
    if section in ("transformers", "PEFT"):
        import transformers

        from tests.integrations.trainer_job import model, samples

        arguments = transformers.TrainingArguments(
            str(folder), use_cpu=True, max_steps=4, report_to=[], disable_tqdm=True
        )
        found.update(Trainer=transformers.Trainer, arguments=arguments, dataset=samples(), model=model(torch.float32))
    if section == "PEFT":
        import peft

        from tests.integrations.test_peft import plain

        found.update(get_peft_model=peft.get_peft_model, LoraConfig=peft.LoraConfig, model=plain())
    if section == "Accelerate":
        import accelerate

        found.update(Accelerator=lambda: accelerate.Accelerator(cpu=True), model=classifier(), loader=loader())
    if section == "Lightning":
        import lightning

        found["lightning"] = lightning
    if section == "timm":
        import timm

        found["model"] = timm.create_model("test_vit", num_classes=4)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("section", NEEDED)
def test_code_runs(section, tmp_path):
    for name in NEEDED[section]:
        pytest.importorskip(name)
    if section == "Accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
    used = names(section, tmp_path)
    before = [parameter.clone() for parameter in used["model"].parameters()] if "model" in used else []
    page = (PAGES / f"{section.lower()}.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert codes
    for code in codes:
        assert len(code.splitlines()) < 10
        exec(compile(code, section, "exec"), used)
    if section == "transformers":
        used["trainer"].train()
    if section in ("transformers", "Accelerate"):
        after = used["model"].parameters()
        assert any(not one.equal(other) for one, other in zip(before, after, strict=True))
    elif section == "Lightning":
        fit_lightning(used["Module"])
    else:
        assert isinstance(used["optimizer"], natgrad.NaturalMuon)


def fit_lightning(base):
    """Train the module of the page with a network."""
    import lightning

    class Whole(base):
        def __init__(self):
            super().__init__()
            self.network = classifier()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    module = Whole()
    before = module.network[0].weight.clone()
    trainer.fit(module, loader())
    assert not module.network[0].weight.equal(before)
