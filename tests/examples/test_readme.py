"""The README's loop runs as pasted, with natgrad's required dependencies, and its links lead to pages that exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# What `pip install .` does not bring (`project.optional-dependencies`).
OPTIONAL = ("typer", "sklearn", "matplotlib", "PIL", "torchmetrics", "jinja2", "scipy")


def test_its_snippets_run_in_turn_and_the_model_learns():
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    assert code.index("natgrad.NaturalMuon(model, lr=2e-2)") < code.index("natgrad.Preconditioner(")
    before = (
        f"import sys, warnings\nfor name in {OPTIONAL!r}: sys.modules[name] = None\nwarnings.simplefilter('error')\n"
    )
    after = "\nprint(nn.functional.cross_entropy(model(inputs), targets).item())"
    done = subprocess.run([sys.executable, "-c", before + code + after], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.3


def test_its_links_are_absolute_and_lead_to_files():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        place = re.fullmatch(
            r"https://(?:github|raw\.githubusercontent)\.com/natgrad/natgrad/(?:blob/)?main/(.+)", link
        )
        assert place, link
        assert (ROOT / place[1]).exists(), link


def test_it_is_short():
    assert len(README.split()) < 1000
