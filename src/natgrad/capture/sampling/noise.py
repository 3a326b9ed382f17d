"""Seeds as functions of what is drawn: to resume, randomness needs no state but a number of steps."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a seed below 2⁶³, another for each sequence of `parts`, such as a user's seed, a rank and a step."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
