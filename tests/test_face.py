"""Nothing public is lost: every name of commit d54ec43 is there, with its parameters, in their order, and defaults."""

import json
from pathlib import Path

import pytest

from tests.face import face

BEFORE = json.loads((Path(__file__).parent / "face.json").read_text())
NOW = face()
# What was changed by name since.
CHANGED = {
    ("DASO", "merge"): "'delta'",
    ("averaging.DASO", "merge"): "'delta'",
    ("Preconditioner", "damping"): "None",
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_public_name_keeps_its_parameters_and_defaults(name):
    assert name in NOW
    expected = {parameter: CHANGED.get((name, parameter), default) for parameter, default in BEFORE[name].items()}
    kept = {parameter: default for parameter, default in NOW[name].items() if parameter in expected}
    assert list(kept.items()) == list(expected.items())
    added = {parameter: default for parameter, default in NOW[name].items() if parameter not in expected}
    assert all(added.values()), "what is new has a default"
