"""What all tests have in common."""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from tests import device, thinning
from tests.site import torchvision_finder

torchvision_finder.install()  # before torchmetrics imports it

# Whether gradient hooks run in compiled models: backward graphs of torch 2.11 drop hooks without outputs.
SEES_COMPILED = TorchVersion(torch.__version__) >= TorchVersion("2.13")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests put their tensors, by themselves and on ranks")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: many tests of several ranks wait."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    os.environ[device.VARIABLE] = config.getoption("--device")
    tensors = device.chosen()  # those that tests make while they are imported too
    tensors.__enter__()
    config.add_cleanup(lambda: tensors.__exit__(None, None, None))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thinning.mark_slow(items)


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests out of what the garbage collector looks at again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if device.name() != "cpu" and item.get_closest_marker("cpu"):
        pytest.skip("what is done on a CPU alone")
    if item.get_closest_marker("compiles") and not SEES_COMPILED:
        pytest.skip("this torch does not show what it has compiled")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the generators by NATGRAD_TEST_SEED (default 0), so that no test depends on those before it."""
    seed = int(os.environ.get("NATGRAD_TEST_SEED", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave tensors to torch where it compiles, and to tests that have some on a GPU and others not."""
    if request.node.get_closest_marker("compiles"):
        place: AbstractContextManager[object] = device.as_torch_does()
    else:
        place = device.untold() if request.path.parent.name == "cuda" else nullcontext()
    with place:
        yield
