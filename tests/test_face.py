"""Nothing public is lost: every name of commit d54ec43 is there, with its parameters, in their order, and defaults."""

import json
from pathlib import Path

import pytest

from tests.face import face

FOLDER = Path(__file__).parent
BEFORE = json.loads((FOLDER / "face.json").read_text())
ADDED = json.loads((FOLDER / "face_added.json").read_text())
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


def test_names_added_since_are_those_written_down():
    """After a change on purpose, write what `python -m tests.face` prints of them into face_added.json."""
    assert {name: parameters for name, parameters in NOW.items() if name not in BEFORE} == ADDED
