"""Nothing public is lost: every name of commit d54ec43 is there, with its parameters, in their order, and defaults."""

import json
from pathlib import Path

import pytest

import natgrad
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


# What has another signature since: that in face_added.json.
REPLACED = {"KBFGS"}

# What was removed by name since (`natgrad._REMOVED` says what replaces it), and parameters that went with it.
DROPPED = set(natgrad._REMOVED)
DROPPED_PARAMETERS = {
    *(("Placement", name) for name in ("link", "nodes", "inside")),
    *((f"{home}Adaptive", "by") for home in ("", "refresh.")),
    *((f"{home}TraceRule", "lower") for home in ("", "refresh.")),
    ("DASO.exchange", "told"),
    ("Preconditioner.step", "closure"),
    ("PreconditionedOptimizer.step", "replay"),
    *(("Guard", name) for name in ("patience", "ladder")),
}


def is_dropped(name):
    return any(part in DROPPED for part in name.split("."))


@pytest.mark.parametrize("name", sorted(DROPPED))
def test_a_removed_name_says_what_replaces_it(name):
    with pytest.raises(AttributeError, match=rf"natgrad\.{name} was removed: ."):
        getattr(natgrad, name)


@pytest.mark.parametrize("name", [name for name in BEFORE if not is_dropped(name) and name not in REPLACED])
def test_a_public_name_keeps_its_parameters_and_defaults(name):
    assert name in NOW
    expected = {
        parameter: CHANGED.get((name, parameter), default)
        for parameter, default in BEFORE[name].items()
        if (name, parameter) not in DROPPED_PARAMETERS
    }
    kept = {parameter: default for parameter, default in NOW[name].items() if parameter in expected}
    assert list(kept.items()) == list(expected.items())
    added = {parameter: default for parameter, default in NOW[name].items() if parameter not in expected}
    assert all(added.values()), "what is new has a default"


def test_names_added_since_are_those_written_down():
    """After a change on purpose, write what `python -m tests.face` prints of them into face_added.json."""
    assert {name: parameters for name, parameters in NOW.items() if name not in BEFORE or name in REPLACED} == ADDED
