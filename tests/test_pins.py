"""What a development environment installs is pinned in constraints.txt, with the day of its release."""

import re
from datetime import date
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = Path(__file__).parent.parent / "constraints.txt"


def pinned():
    """Return the version and the day of the release of each pinned package."""
    lines = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    pins = [re.fullmatch(r"([\w.-]+)==([\w.+]+)  # released (\d{4}-\d\d-\d\d)", line) for line in lines]
    assert [line for line, pin in zip(lines, pins, strict=True) if pin is None] == []
    return {canonicalize_name(pin[1]): (pin[2], date.fromisoformat(pin[3])) for pin in pins}


def required(name, extras, found):
    """Add the names of all installed packages that a package needs."""
    for text in metadata.requires(name) or ():
        needed = Requirement(text)
        if needed.marker is not None and not any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        key = canonicalize_name(needed.name)
        try:
            metadata.version(key)
        except metadata.PackageNotFoundError:  # a pin that this environment does not have yet
            found.add(key)
            continue
        if key not in found or needed.extras:
            found.add(key)
            required(key, needed.extras, found)
    return found


def test_every_dependency_is_pinned():
    names = required("natgrad", ("dev",), set()) - {"natgrad", "setuptools"}
    assert len(names) > 30
    assert {name for name in names if not name.startswith(("nvidia", "cuda", "triton"))} - pinned().keys() == set()


def test_every_pin_was_released_before_the_pins_were_chosen():
    chosen = date.fromisoformat(re.search(r"resolved on (\d{4}-\d\d-\d\d)", PINS.read_text())[1])
    assert {name: released for name, (_, released) in pinned().items() if released > chosen} == {}
