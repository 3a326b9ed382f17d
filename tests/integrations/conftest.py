import pytest

from tests.integrations.launch import launch


@pytest.fixture(scope="module")
def on_two_ranks(request, tmp_path_factory):
    """What each of two ranks has written in the job of the module."""
    return launch(request.module.JOB, 2, tmp_path_factory.mktemp(request.module.JOB))
