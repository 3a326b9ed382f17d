"""The seeded faults (`python -m tests.faults`)."""

from tests.faults.faults import FAULTS, edited


def test_every_fault_has_a_place_in_the_source():
    for fault in FAULTS.values():
        for edit in fault.edits:
            assert edited(*edit)[1] is not None, edit
