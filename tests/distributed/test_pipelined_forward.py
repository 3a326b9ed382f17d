"""``placement="pipelined"``: A leaves in the forward pass, as a guess; whatever comes of it, ranks equal comm-opt."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.curvature.sides import Full
from tests.dense import reference as dense
from tests.distributed import jobs
from tests.distributed.jobs import place, share
from tests.distributed.test_pipelined import SINGLY

LAYERS = 3


# The elements of the factors: of two groups with three patches and a bias, and two linear layers, as triangles.
A, G = 2 * 10 + 91 + 21, 2 * 3 + 15 + 6


# Nothing is known in the first step, and the second one shows when layers are ready.
WARM = 2


class Trainer:
    """A network in training that tells how many messages have left before each backward pass and before each step."""

    def __init__(self, placement, model=None, curvature=None, **options):
        self.model = jobs.network() if model is None else model
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.preconditioner = natgrad.Preconditioner(
            self.wrapped,
            natgrad.KFAC() if curvature is None else curvature,
            placement=placement,
            **{"damping": 0.05, "refresh": natgrad.Refresh(factors=1, inverses=2)} | options,
        )
        self.ahead, self.left, self.bytes = [], [], []

    @property
    def departed(self):
        return self.preconditioner._capture.sums.departed

    def forward(self, x, y):
        outputs = self.wrapped(x)
        return cross_entropy(outputs, y), outputs

    def backward(self, loss, outputs=None, **options):
        self.ahead.append(self.departed)
        self.bytes.append(self.preconditioner.traffic().get("factors", 0))
        if options or outputs is None:
            loss.backward(**options)
        else:
            self.preconditioner.backward(loss, outputs)

    def finish(self):
        self.left.append(self.departed)
        self.preconditioner.step()
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
        self.model.zero_grad()

    def result(self):
        return dict(self.model.state_dict()), self.ahead, self.left, self.preconditioner.traffic()


def data(step):
    return [share(tensor) for tensor in jobs.batch(step)]


def compare(ranks, count, function, *args, tolerance=1e-10):
    """Train under both placements: the same parameters. Return what left before the backward passes and the steps."""
    ours, theirs = (ranks.run(count, function, placement, *args) for placement in (SINGLY, "comm-opt"))
    for result in ours:
        dense.assert_equal(result[0], ours[0][0], 0)
        dense.assert_equal(result[0], theirs[0][0], tolerance)
    return [result[1] for result in ours], [result[2] for result in ours], [result[3] for result in ours + theirs]


def train(placement, steps=6, **options):
    trainer = Trainer(placement, **options)
    for step in range(steps):
        trainer.backward(*trainer.forward(*data(step)))
        trainer.finish()
    return trainer


# --- A leaves in the forward pass -------------------------------------------------------------------------------


def count_products(placement):
    """Tell the products of inputs and of gradients, before and after the forward pass ends, and bytes sent by then."""
    counts, original = {"A": 0, "G": 0}, Full.add_

    def add_(self, out, rows, *, scale, overwrite):
        counts["A" if scale == 1.0 else "G"] += 1
        return original(self, out, rows, scale=scale, overwrite=overwrite)

    Full.add_ = add_
    try:
        trainer, before, after, sent = Trainer(placement), [], [], []
        for step in range(5):
            counts.update(A=0, G=0)
            loss, _ = trainer.forward(*data(step))
            before.append(dict(counts))
            trainer.backward(loss)
            after.append(dict(counts))
            trainer.finish()
            sent.append(trainer.preconditioner.traffic()["factors"])
        return trainer.ahead, trainer.left, before, after, trainer.bytes, sent
    finally:
        Full.add_ = original


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_sums_of_inputs_leave_before_the_backward_pass_begins(ranks, count):
    """All of them, and nothing is computed twice."""
    for ahead, left, before, after, by_then, sent in ranks.run(count, count_products, SINGLY):
        assert ahead == [0, 0, LAYERS, LAYERS, LAYERS]
        assert left == [0, LAYERS, 2 * LAYERS, 2 * LAYERS, 2 * LAYERS]
        assert before == [{"A": 0, "G": 0}] + [{"A": LAYERS, "G": 0}] * 4
        assert after == [{"A": LAYERS, "G": LAYERS}] * 5
        share = 2 * (count - 1) / count * 8
        for step in range(WARM, 5):
            assert by_then[step] - sent[step - 1] == pytest.approx(A * share, abs=1)
            assert sent[step] - sent[step - 1] == pytest.approx((A + G) * share, abs=1)


def plainly(placement, options):
    return train(placement, **options).result()


OPTIONS = {
    "eigen": {},
    "inverse": {"curvature": natgrad.KFAC(form="inverse")},
    "blocks": {"curvature": natgrad.KFAC(max_factor_size=4, wide="blocks")},
    "diagonal": {"curvature": natgrad.KFAC(max_factor_size=5, wide="diagonal")},
    "inputs alone": {"curvature": natgrad.KFAC(form="inverse", sides="a")},  # of which nothing but counters is left
    "sampled labels": {"curvature": natgrad.KFAC(fisher="sampled", likelihood="categorical")},
    "refreshed seldom": {"refresh": natgrad.Refresh(factors=2, inverses=4), "steps": 9},
}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_equal_comm_opt(ranks, name, count):
    ahead, left, traffic = compare(ranks, count, plainly, OPTIONS[name])
    due = slice(2 * WARM, None, 2) if name == "refreshed seldom" else slice(WARM, None)
    for own in ahead if count > 1 else []:
        assert set(own[due]) == {LAYERS}, ahead
    for own in left if count > 1 else []:
        assert set(own[due]) == {2 * LAYERS}, left
    for ours, theirs in zip(traffic[:count], traffic[count:], strict=True):
        assert ours.get("factors") == theirs.get("factors")


SLOW = natgrad.Link(latency=0.0, bandwidth=1.0)  # of two messages in a row, each is ready before the other has left


FAR = natgrad.Link(latency=9.0)


def train_over(placement, link):
    told = natgrad.Placement(name="pipelined", link=link) if placement == SINGLY else placement
    trainer = train(told)
    messages = trainer.preconditioner._capture.sums._messages if placement == SINGLY and place()[1] > 1 else []
    return *trainer.result()[:3], [message.early for message in messages]


@pytest.mark.parametrize(("link", "early"), [(SLOW, True), (FAR, False)])
def test_the_link_decides_whether_anything_leaves_then(ranks, link, early):
    """Where latency is what messages cost, one is best; where bandwidth is, what is ready leaves at once."""
    ahead, left, forms = compare(ranks, 2, train_over, link)
    for own, of, messages in zip(ahead, left, forms, strict=False):
        assert messages == sorted(messages, reverse=True)
        assert (sum(messages) > 0) == early
        assert len(messages) == 1 or early
        assert own[-2:] == [sum(messages)] * 2
        assert of[-2:] == [len(messages)] * 2


# --- What may come of a guess -----------------------------------------------------------------------------------


def accumulate(placement, parts):
    trainer = Trainer(placement)
    for step in range(5):
        x, y = data(step)
        for index, (xs, ys) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
            with trainer.wrapped.no_sync() if index < parts - 1 else torch.enable_grad():
                loss, _ = trainer.forward(xs, ys)
                trainer.backward(loss / parts)
        trainer.finish()
    return trainer.result()


@pytest.mark.parametrize("count", [2, 3])
def test_the_last_micro_batch_alone_is_guessed(ranks, count):
    ahead, *_ = compare(ranks, count, accumulate, 3)
    assert ahead == [[0, 0, 0] * WARM + [0, 0, LAYERS] * 3] * count


def train_unevenly(placement, counts):
    """Each rank has other numbers of micro-batches of other sizes; one of them has none at all in some steps."""
    trainer, rank = Trainer(placement, gradients="reduce"), place()[0]
    for step, parts in enumerate(counts[rank]):
        x, y = jobs.batch(step)
        x, y = x[: 3 + 2 * rank], y[: 3 + 2 * rank]
        for xs, ys in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True) if parts else ():
            outputs = trainer.model(xs)
            trainer.backward(cross_entropy(outputs, ys) / parts)
        trainer.finish()
    return trainer.result()


def test_ranks_that_do_not_do_alike(ranks):
    counts = [[1, 1, 1, 1, 1, 1, 1, 1], [2, 2, 2, 3, 2, 2, 2, 2], [1, 0, 1, 1, 0, 1, 1, 1]]
    ahead, *_ = compare(ranks, 3, train_unevenly, counts)
    assert ahead[0][WARM] == LAYERS


def guess_in_vain(placement, when, evaluating):
    """Forward passes with gradients that nobody asks for, of one rank only or of all."""
    trainer = Trainer(placement)
    for step in range(9):
        x, y = data(step)
        some = [0] if when == "one rank" else [0, 1]
        if step % 4 == 3 and place()[0] in some:
            trainer.model.train(not evaluating)
            kept = [trainer.model(x[:2] + index) for index in range(2)]
            if when != "alive":
                del kept
            trainer.model.train()
        trainer.backward(*trainer.forward(x, y))
        trainer.finish()
    return trainer.result()


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("when", ["all ranks", "one rank", "alive"])
def test_forward_passes_that_are_never_differentiated(ranks, when, evaluating):
    """What left is sent again, and nothing leaves in the next forward pass; evaluation mode is not guessed in."""
    ahead, left, traffic = compare(ranks, 2, guess_in_vain, when, evaluating)
    sent, needed = traffic[0]["factors"], traffic[2]["factors"]
    if evaluating:
        assert ahead == [[0, 0, *[LAYERS] * 7]] * 2
        assert sent == needed
        return
    # A wrong guess, a pass without any, and right ones; after the next wrong guess three passes without any.
    assert ahead == [[0, 0, LAYERS, LAYERS, 0, LAYERS, LAYERS, LAYERS, 0]] * 2
    assert left == [[0, LAYERS, *[2 * LAYERS] * 2, LAYERS, *[2 * LAYERS] * 3, LAYERS]] * 2
    assert sent == needed + 2 * A * 8  # again in two of the steps


def stop_after_the_forward_pass(placement, stopping):
    """Some ranks do not differentiate what they have computed: their samples do not count in that step."""
    trainer = Trainer(placement, gradients="reduce")
    for step in range(7):
        x, y = data(step)
        loss = cross_entropy(trainer.model(x), y)
        if step not in (3, 5) or place()[0] not in stopping:
            trainer.backward(loss)
        trainer.finish()
    return trainer.result()


@pytest.mark.parametrize("stopping", [[0], [1], [0, 1]])
def test_ranks_that_stop_after_the_forward_pass(ranks, stopping):
    _, left, _ = compare(ranks, 2, stop_after_the_forward_pass, stopping)
    assert all(own[3] == (LAYERS if rank in stopping else 2 * LAYERS) for rank, own in enumerate(left))
