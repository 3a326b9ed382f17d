"""torch.compile: wherever the model is compiled, training is that of the plain model, and nothing is compiled anew."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import natgrad
from tests import device

pytestmark = pytest.mark.compiles

FISHERS = [{}, {"sharing": "reduce"}, {"fisher": "sampled", "likelihood": "categorical"}]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """Normalised, residual, with an activation in place."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.linear, self.activation = nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.activation(self.linear(self.norm(x)))


class Network(nn.Module):
    """A convolution, equal blocks on its positions, a head that is used twice."""

    def __init__(self, *, blocks=2, reentrant=None):
        super().__init__()
        self.convolution = nn.Conv1d(2, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Block(4) for _ in range(blocks)])
        self.head = nn.Linear(4, 3)
        self.reentrant = reentrant  # None: no checkpoints

    def forward(self, x):
        x = self.convolution(x).mT
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1)) + self.head(x[:, 0])


def network(**options):
    torch.manual_seed(0)
    return Network(**options).double()


def batch(step, samples=6):
    generator = device.generator(step)
    x = torch.randn(samples, 2, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


class Training:
    """A model in training; `called` is what the loop calls."""

    def __init__(self, model, called, *, curvature=None, given=None, micro_batches=1, **options):
        self.model, self.called, self.micro_batches = model, called, micro_batches
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.preconditioner = natgrad.Preconditioner(
            model if given is None else given,
            natgrad.KFAC(**(curvature or {})),
            optimizer=self.optimizer,
            damping=0.1,
            refresh=natgrad.Refresh(factors=2, inverses=3),
            **options,
        )

    def step(self, step, samples=6):
        self.optimizer.zero_grad()
        x, y = batch(step, samples)
        for xs, ys in zip(x.chunk(self.micro_batches), y.chunk(self.micro_batches), strict=True):
            outputs = self.called(xs)
            self.preconditioner.backward(cross_entropy(outputs, ys) / self.micro_batches, outputs)
        self.preconditioner.step()
        self.optimizer.step()

    def steps(self, count):
        for step in range(count):
            self.step(step)
        return self.model.state_dict()


def assert_same(actual, expected, tolerance=1e-9):
    for (name, one), other in zip(actual.items(), expected.values(), strict=True):
        assert float((one - other).norm()) <= tolerance * float(other.norm()), name


def wrapped_before(model, **options):
    compiled = torch.compile(model, **options)
    return compiled, compiled


def wrapped_after(model, **options):
    return torch.compile(model, **options), None


def in_place(model, **options):
    model.compile(**options)
    return model, None


def blocks_only(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model, None


def called_before(model, **options):
    compiled = torch.compile(model, **options)
    compiled(batch(0)[0]).sum().backward()
    return compiled, compiled


def called_before_and_given_plain(model, **options):
    return called_before(model, **options)[0], None


def called_in_place_before(model, **options):
    model.compile(**options)
    model(batch(0)[0]).sum().backward()
    return model, None


WAYS = [
    wrapped_before, wrapped_after, in_place, blocks_only,
    called_before, called_before_and_given_plain, called_in_place_before,
]  # fmt: skip


# Every way, with one Fisher after the other; the remaining pairs take their time.
PAIRS = [
    pytest.param(way, fisher, marks=[] if (row - column) % len(FISHERS) == 0 else pytest.mark.slow)
    for row, way in enumerate(WAYS)
    for column, fisher in enumerate(FISHERS)
]


@pytest.mark.values
@pytest.mark.parametrize(("way", "curvature"), PAIRS)
def test_a_compiled_model_trains_as_the_plain_one(way, curvature):
    plain = network()
    expected = Training(plain, plain, curvature=curvature).steps(3)
    model = network()
    called, given = way(model, backend="aot_eager", fullgraph=True)
    assert_same(Training(model, called, given=given, curvature=curvature).steps(3), expected)


@pytest.mark.parametrize("curvature", FISHERS[1:])
def test_accumulation_in_a_compiled_model(curvature):
    plain, model = network(), network()
    expected = Training(plain, plain, curvature=curvature, micro_batches=3).steps(3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(Training(model, compiled, curvature=curvature, micro_batches=3).steps(3), expected)


class Frames(nn.Module):
    """A batch in a dict, whose frames a layer sees as a longer batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frame, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, batch):
        x = batch["x"]
        return self.head(self.frame(x.mT.flatten(0, 1)).tanh().view(len(x), -1, 4).mean(1))

    def predict(self, x):
        return self.forward({"x": x})


@pytest.mark.some(2)
@pytest.mark.parametrize("curvature", FISHERS)
def test_the_batch_size_of_a_compiled_model(curvature):
    """That of a tensor in a dict, which shrinks and grows."""
    plain, model = Frames().double(), Frames().double()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    expected = Training(plain, lambda x: plain({"x": x}), curvature=curvature)
    actual = Training(model, lambda x: compiled({"x": x}), curvature=curvature)
    counts = []
    for step, samples in enumerate([6, 4, 8, 6, 5]):
        expected.step(step, samples)
        actual.step(step, samples)
        counts.append(counter.frame_count)
    assert_same(model.state_dict(), plain.state_dict())
    assert counts[1] == counts[-1]


@pytest.mark.parametrize("way", [wrapped_before, pytest.param(in_place, marks=pytest.mark.slow), blocks_only])
def test_nothing_is_compiled_anew(way):
    """Statistics are due at every second step only, and the batch shrinks and grows."""
    model = network(blocks=10 if way is blocks_only else 2)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    called, given = way(model, backend=counter, fullgraph=True)
    training = Training(model, called, given=given)
    for step, samples in enumerate([6, 4]):  # Dynamo itself goes over to dynamic shapes at the second one
        training.step(step, samples)
    compiled = counter.frame_count
    assert 0 < compiled <= 8
    for step in range(2, 10):
        training.step(step, 6 + step % 3)
    assert counter.frame_count == compiled


def test_evaluation_of_a_compiled_model():
    plain, model = network(), network()
    expected = Training(plain, plain)
    actual = Training(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    for step in range(4):
        for training in (expected, actual):
            training.step(step)
            with torch.no_grad():
                training.called.eval()(batch(100, samples=3)[0])
            training.called.train()
    assert_same(model.state_dict(), plain.state_dict())


COMPILED = {"backend": "aot_eager", "fullgraph": True}


def test_checkpoints_inside_a_compiled_model():
    plain, model = network(), network(reentrant=False)
    expected = Training(plain, plain, curvature=FISHERS[2]).steps(3)
    compiled = torch.compile(model, **COMPILED)
    assert_same(Training(model, compiled, curvature=FISHERS[2]).steps(3), expected)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_compiled_blocks_inside_checkpoints(micro_batches):
    plain, model = network(), network(reentrant=False)
    expected = Training(plain, plain, curvature=FISHERS[2], micro_batches=micro_batches).steps(3)
    called, _ = blocks_only(model, **COMPILED)
    assert_same(Training(model, called, curvature=FISHERS[2], micro_batches=micro_batches).steps(3), expected)


@pytest.mark.parametrize("curvature", FISHERS)
def test_compiled_blocks_inside_reentrant_checkpoints_are_refused(curvature):
    model, _ = blocks_only(network(reentrant=True), **COMPILED)
    with pytest.raises(natgrad.NatgradError, match="use_reentrant=False"):
        Training(model, model, curvature=curvature).step(0)
