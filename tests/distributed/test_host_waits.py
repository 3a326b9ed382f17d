"""What a step reads on the host: nothing of a device, but where a renewal or a guess is checked.

Tensors are on the CPU here, where a read costs nothing; what is counted are the places that would wait for an
accelerator. Those that ask for the device first are known by name.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad
from tests.distributed.jobs import Job, Training, batch, share

READS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique_consecutive", "masked_select"}
ON_THE_CPU_ALONE = {
    ("communicator.py", "any_on_host"),
    ("audit.py", "report"),  # in the first steps, after the step before
    ("device.py", "known_all"),
    ("device.py", "known_between"),
    ("guard.py", "check"),
    ("reduction.py", "_check_steps"),
}
ROOM = str(Path(natgrad.__file__).parent)


def reader():
    """The innermost function of the library that is under way."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(ROOM):
        frame = frame.f_back
    return None if frame is None else (Path(frame.f_code.co_filename).name, frame.f_code.co_name)


class Reads(TorchDispatchMode):
    """Notes who of the library reads a tensor on the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in READS:
            self.found.append(reader())
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.tolist = torch.Tensor.tolist  # which no dispatcher sees
        noted = self.found

        def tolist(tensor):
            noted.append(reader())
            return self.tolist(tensor)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self.tolist
        return super().__exit__(*error)

    def waits(self):
        return [place for place in self.found if place is not None and place not in ON_THE_CPU_ALONE]


def read_in_steps(options, wrapped, steps=8):
    """The places that read in each step, of which only the first and the sixth renew anything."""
    job = Job(options=options, wrapped=wrapped, refresh={"factors": 5, "inverses": 5})
    training = Training(job)
    found = []
    for step in range(steps):
        x, y = (share(tensor) for tensor in batch(step))
        training.optimizer.zero_grad()
        cross_entropy(training.wrapped(x), y).backward()
        with Reads() as reads:
            training.preconditioner.step()
        found.append(reads.waits())
        training.optimizer.step()
    return found


WAYS = {
    "comm-opt": ({"placement": "comm-opt"}, True),
    "mem-opt": ({"placement": "mem-opt"}, True),
    "pipelined": ({"placement": "pipelined"}, True),
    "comm-opt, reduce": ({"placement": "comm-opt", "gradients": "reduce"}, False),
    "mem-opt, reduce": ({"placement": "mem-opt", "gradients": "reduce"}, False),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_plain_step_waits_for_nothing(ranks, way):
    for found in ranks.run(2, read_in_steps, *WAYS[way]):
        assert found[0]  # the first one checks what ranks have, and renews
        busy = {0, 5} | ({1} if "reduce" in way else set())  # the second one creates the group of the passes' messages
        assert [places for step, places in enumerate(found) if places and step not in busy] == []
