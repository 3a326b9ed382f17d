"""The wheel and the source distribution, and the wheel in an environment with nothing but what natgrad requires.

No test here needs a package index: hatchling is in the extra `dev`, and the environment links to packages of this one.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import natgrad

ROOT = Path(__file__).parents[1]


def run(*command, cwd, code=0, seconds=240):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=variables, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def build(project, folder, *targets):
    """Return the files that hatchling builds."""
    flags = [word for target in targets for word in ("--target", target)]
    run(sys.executable, "-m", "hatchling", "build", *flags, "--directory", folder, cwd=project)
    return sorted(folder.iterdir())


def contents(wheel):
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def required(name):
    """Return the names of the distributions that `name` requires without extras, with all that these require."""
    found, waiting = set(), [name]
    while waiting:
        for line in distribution(waiting.pop()).requires or ():
            requirement = Requirement(line)
            if (not requirement.marker or requirement.marker.evaluate({"extra": ""})) and requirement.name not in found:
                found.add(requirement.name)
                waiting.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution."""
    source, wheel = sorted(build(ROOT, tmp_path_factory.mktemp("dist"), "sdist", "wheel"), key=lambda path: path.suffix)
    return wheel, source


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """The folder of the commands of a virtual environment with the wheel and what it requires."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    for name in required("natgrad"):
        files = distribution(name).files
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(files[0].locate().parents[len(files[0].parts) - 1] / top)
    commands = home / "bin"
    pip = [sys.executable, "-m", "pip", "--python", commands / "python", "install", "--quiet", "--no-index"]
    run(*pip, built[0], cwd=home)
    return commands


def test_the_wheel_has_every_file_of_the_package(built):
    packaged = {name for name in contents(built[0]) if not name.partition("/")[0].endswith(".dist-info")}
    files = (ROOT / "src").rglob("*")
    assert packaged == {
        path.relative_to(ROOT / "src").as_posix() for path in files if path.is_file() and path.suffix != ".pyc"
    }
    assert "natgrad/py.typed" in packaged


def test_the_source_distribution_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (project,) = tmp_path.iterdir()
    (wheel,) = build(project, tmp_path / "dist", "wheel")
    assert contents(wheel) == contents(built[0])


_TRAIN = """
import torch, natgrad, importlib.metadata
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = natgrad.NaturalMuon(model, lr=2e-2)
inputs, targets = torch.randn(32, 8), torch.randint(3, (32,))
losses = []
for _ in range(3):
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[2] < losses[1] < losses[0], losses
print(natgrad.__file__)
print(natgrad.__version__, importlib.metadata.version("natgrad"))
"""


def test_the_wheel_trains_with_what_it_requires(environment, tmp_path):
    file, versions = run(environment / "python", "-c", _TRAIN, cwd=tmp_path).stdout.splitlines()
    assert Path(file).is_relative_to(environment.parent)
    assert versions == f"{natgrad.__version__} {natgrad.__version__}"


def interpreter(version):
    """Return the command of a Python of this version, or None."""
    command = shutil.which(f"python{version}")
    works = command and not subprocess.run([command, "--version"], capture_output=True, check=False).returncode
    return command if works else None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("newest", [False, True])
def test_it_trains_on_the_ends_of_the_ranges_of_python_and_torch(built, newest, tmp_path):
    """The source distribution on Python 3.10 and torch 2.6, the wheel on the newest of both that are here."""
    wheel, source = built
    versions = [f"3.{minor}" for minor in ((14, 13, 12) if newest else (10,)) if interpreter(f"3.{minor}")]
    if not versions:
        pytest.skip("there is no such Python")
    python = tmp_path / "environment/bin/python"
    run(interpreter(versions[0]), "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    wanted = (wheel, "torch") if newest else (source, "torch==2.6.*")
    run(python, "-m", "pip", "install", "--quiet", *wanted, cwd=tmp_path, seconds=1500)
    assert run(python, "-c", _TRAIN, cwd=tmp_path).stdout.endswith(f"{natgrad.__version__}\n")


def test_the_command_without_its_extra_is_one_line(environment, tmp_path):
    done = run(environment / "natgrad", "tasks", cwd=tmp_path, code=1)
    (line,) = done.stderr.splitlines()
    assert "pip install 'natgrad[" in line
    assert not done.stdout
