"""A full disk, without one."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(most):
    """Let the operating system refuse that files of this process grow beyond `most` bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
