"""A profile shows each kind of message by its name."""

import pytest

from tests.test_profiling import ranges_of_a_step


@pytest.mark.parametrize(
    ("curvature", "placement", "gradients", "kinds"),
    [
        ("kfac", "comm-opt", "averaged", {"factors", "inverses"}),
        ("kfac", "mem-opt", "reduce", {"factors", "gradients", "counters"}),
        ("kfac", "reduce-scatter", "averaged", {"factors", "gradients"}),
        ("hylo", "comm-opt", "averaged", {"rows", "inverses", "counters"}),
    ],
)
def test_each_kind_of_message_is_a_range(ranks, curvature, placement, gradients, kinds):
    found = ranks.run(2, ranges_of_a_step, curvature, placement, gradients)
    for ranges in found:
        sent = {name.removeprefix("send.") for name in ranges if name.startswith("send.")}
        assert kinds <= sent
