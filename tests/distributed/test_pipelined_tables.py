"""``placement="pipelined"`` with embeddings: how often entries are looked up leaves in the forward pass."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.distributed.jobs import place
from tests.distributed.test_pipelined_forward import WARM, Trainer, compare


class Sequence(nn.Module):
    """Tokens, some of them padding, with their positions, that are looked up once for all samples."""

    def __init__(self, *, tied):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(7, 4, padding_idx=0), nn.Embedding(5, 4)
        self.mixed, self.head = nn.Linear(4, 4), nn.Linear(4, 7)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return self.head(self.mixed(self.tokens(x) + self.positions(places)).tanh().mean(1))


def train(placement, form, tied, sharing):
    rank, ranks = place()
    curvature = natgrad.KFAC(form=form, sharing=sharing)
    trainer = Trainer(placement, Sequence(tied=tied).double(), {"*": curvature})
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(7, (12, 5), generator=generator), torch.randint(7, (12,), generator=generator)
        outputs = trainer.wrapped(x.chunk(ranks)[rank])
        trainer.backward(cross_entropy(outputs, y.chunk(ranks)[rank]), outputs)
        trainer.finish()
    return trainer.result()


# Of the layers with sums of their own: both tables, the linear ones; and of a table that is a head as well, none.
@pytest.mark.parametrize(
    ("tied", "sharing", "early"), [(False, "expand", 4), (True, "expand", 2), (False, "reduce", 0)]
)
@pytest.mark.parametrize("form", ["eigen", "inverse"])
@pytest.mark.parametrize("count", [2, 3])
def test_lookups_leave_before_the_backward_pass_begins(ranks, count, form, tied, sharing, early):
    ahead, _, traffic = compare(ranks, count, train, form, tied, sharing)
    for own in ahead:
        assert set(own[WARM:]) == {early}
    for ours, theirs in zip(traffic[:count], traffic[count:], strict=True):
        assert ours["factors"] == pytest.approx(theirs["factors"], abs=40)
