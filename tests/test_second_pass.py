"""The second pass over a batch, after the optimizer's step: what it leaves alone, what it needs, and what it takes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import natgrad
from tests import device
from tests.dense import reference as dense

EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(step, samples=8, dtype=torch.float64):
    generator = device.generator(step)
    return torch.randn(samples, 4, generator=generator, dtype=dtype), torch.randint(3, (samples,), generator=generator)


class Training:
    """A model in training by K-BFGS."""

    def __init__(self, model=None, curvature=None, **options):
        self.model = network() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        curvature = natgrad.KBFGS() if curvature is None else curvature
        options = {"damping": 0.05, "refresh": EVERY_STEP, **options}
        self.preconditioner = natgrad.Preconditioner(self.model, curvature, optimizer=self.optimizer, **options)

    def step(self, x, y):
        def loss():
            return cross_entropy(self.model(x), y)

        self.optimizer.zero_grad()
        loss().backward()
        self.preconditioner.step(loss)
        self.optimizer.step()

    @property
    def blocks(self):
        return flat(self.preconditioner)


def flat(preconditioner):
    blocks = preconditioner.state_dict()["blocks"]
    return {f"{key} {name}": tensor.double() for key, own in blocks.items() for name, tensor in own.items()}


def assert_alike(one, other, tolerance=1e-10):
    kept = [own for own in one if not own.endswith(("renewed", "ladder"))]
    dense.assert_equal({name: one[name] for name in kept}, {name: other[name] for name in kept}, tolerance)


class Noisy(nn.Module):
    """A model that draws, counts and normalises, and keeps what it drew."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.drawn = []

    def forward(self, x):
        self.calls = self.calls + 1  # another tensor each time
        noise = torch.rand(len(x), 4, dtype=x.dtype)
        self.drawn.append(noise)
        return self.head(self.drop(self.norm(self.first(x + noise)).tanh()))


def test_all_is_found_again():
    torch.manual_seed(5)
    training = Training(Noisy().double())
    x, y = batch(0)
    found = {}

    def loss():
        if found:  # the second time, with the habits of training loops
            assert all(parameter.grad is None for parameter in training.model.parameters())
            training.optimizer.zero_grad(set_to_none=False)
            training.model.train(False).train()
            torch.rand(7)
        outputs = training.model(x)
        found["modes"] = training.model.train(bool(training.model.calls % 2))
        return cross_entropy(outputs, y)

    training.optimizer.zero_grad()
    loss().backward()
    torch.rand(3)  # what is drawn between the passes changes nothing
    training.preconditioner.step(loss)
    model = training.model.train()
    buffers = {name: own.clone() for name, own in model.named_buffers()}
    gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    chance = torch.get_rng_state()
    versions = [parameter.grad._version for parameter in model.parameters()]
    training.optimizer.step()
    assert len(model.drawn) == 2
    assert torch.equal(*model.drawn)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(module.training for module in model.modules())
    assert {name: own.tolist() for name, own in model.named_buffers()} == {n: b.tolist() for n, b in buffers.items()}
    for parameter, (gradient, values), version in zip(model.parameters(), gradients, versions, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, values)
        assert gradient._version == version


def test_dropout_drops_the_same():
    """H_G of a model with dropout is that of the model with the masks written out."""

    class Masked(nn.Module):
        def __init__(self, masks):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
            self.masks = masks

        def forward(self, x):
            hidden = self.first(x).tanh()
            hidden = nn.functional.dropout(hidden, 0.5) if self.masks is None else hidden * self.masks
            return self.head(hidden)

    dropped = Training(Masked(None).double())
    for step in range(4):
        torch.manual_seed(step)
        mask = nn.functional.dropout(torch.ones(8, 6).double(), 0.5)
        model = Masked(mask).double()
        if not step:
            plain = Training(model)
        plain.model.masks = mask
        plain.step(*batch(step))
        torch.manual_seed(step)
        dropped.step(*batch(step))
    assert_alike(dropped.blocks, plain.blocks, 1e-12)


def test_accumulation_is_one_batch():
    whole, parts, summed = Training(), Training(), Training(accumulation="sum")
    for step in range(4):
        x, y = batch(step)
        whole.step(x, y)
        for training, count in ((parts, 4), (summed, 1)):
            sizes = list(zip(x.chunk(4), y.chunk(4), strict=True))

            def losses(training=training, sizes=sizes, count=count):
                return [cross_entropy(training.model(xs), ys) / count for xs, ys in sizes]

            training.optimizer.zero_grad()
            for loss in losses():
                loss.backward()
            training.preconditioner.step(lambda losses=losses: sum(losses()))
            if count == 1:
                torch._foreach_div_([p.grad for p in training.model.parameters()], 4.0)
            training.optimizer.step()
    assert_alike(parts.blocks, whole.blocks)
    scaled = {name: own / (4 if name.endswith((" W", " norm")) else 1) for name, own in summed.blocks.items()}
    assert_alike(scaled, whole.blocks)


def test_masked_tokens_are_left_out():
    """Positions that do not count are as if they were not there."""
    tokens, plain = Training(reduction="tokens", kl_clip=None), Training(kl_clip=None)
    for step in range(4):
        x, y = batch(step, 12)
        keep = torch.rand(12, generator=torch.Generator().manual_seed(step)) < 0.7
        xs, ys = x.unflatten(0, (3, 4)), torch.where(keep, y, -100).unflatten(0, (3, 4))

        def loss(xs=xs, ys=ys):
            return cross_entropy(tokens.model(xs).flatten(0, 1), ys.flatten())

        tokens.optimizer.zero_grad()
        loss().backward()
        tokens.preconditioner.step(loss, count=int(keep.sum()))
        tokens.optimizer.step()
        plain.step(x[keep], y[keep])
    assert_alike(tokens.blocks, plain.blocks)


def test_a_loss_scaler_changes_nothing_and_may_skip_a_step():
    model = network(torch.float32)
    plain, scaler = Training(copy.deepcopy(model)), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaled = Training(model, scaler=scaler)
    for step in range(4):
        x, y = batch(step, dtype=torch.float32)
        plain.step(x, y)

        def loss(x=x, y=y):
            return cross_entropy(scaled.model(x), y)

        scaled.optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.unscale_(scaled.optimizer)
        scaled.preconditioner.step(loss)
        scaler.step(scaled.optimizer)
        scaler.update()
    before = scaled.blocks
    assert_alike(before, plain.blocks, 1e-4)

    scaled.optimizer.zero_grad()
    scaler.scale(loss() * float("inf")).backward()
    scaler.unscale_(scaled.optimizer)
    scaled.preconditioner.step(loss)
    scaler.step(scaled.optimizer)
    names = [name for name in before if name.endswith((" W", " s", " y", " H_G"))]
    assert len(names) == 12
    for name in names:
        assert torch.equal(scaled.blocks[name], before[name])
    scaler.update()
    scaled.optimizer.zero_grad()
    scaler.scale(loss()).backward()
    scaler.unscale_(scaled.optimizer)
    scaled.preconditioner.step(loss)  # which warns of no step that was left out


def checkpointed(model, x):
    return model[2:](checkpoint(model[:2], x, use_reentrant=False))


def test_checkpointed_layers():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x):
            return checkpointed(self.layers, x)

    plain, other = Training(), Training(Checkpointed())
    for step in range(3):
        plain.step(*batch(step))
        other.step(*batch(step))
    assert_alike({f"layers.{name}": own for name, own in plain.blocks.items()}, other.blocks)


@pytest.mark.compiles
def test_compiled_models():
    plain, compiled = Training(), Training()
    forward = torch.compile(compiled.model, backend="aot_eager")
    for step in range(3):
        x, y = batch(step)
        plain.step(x, y)

        def loss(x=x, y=y):
            return cross_entropy(forward(x), y)

        compiled.optimizer.zero_grad()
        loss().backward()
        compiled.preconditioner.step(loss)
        compiled.optimizer.step()
    assert_alike(plain.blocks, compiled.blocks)


def test_other_curvatures_do_not_look_again():
    alone, calls = Training(curvature={"0": None, "*": natgrad.KFAC()}), []
    mixed = Training(curvature={"0": natgrad.KBFGS(), "*": natgrad.KFAC()})
    (curvature,) = {stack.curvature for stack in mixed.preconditioner.parts.groups} - {
        mixed.preconditioner.curvature["0"]
    }
    accumulate = curvature.accumulate
    curvature.accumulate = lambda *args, **options: calls.append(1) or accumulate(*args, **options)
    for step in range(3):
        alone.model.load_state_dict(mixed.model.state_dict())
        mixed.step(*batch(step))
        alone.step(*batch(step))
    assert len(calls) == 6
    expected = alone.blocks
    assert_alike(expected, {name: own for name, own in mixed.blocks.items() if name in expected}, 1e-12)
    assert "0.weight H_G" in mixed.blocks


def test_passes_that_are_not_the_loss_change_nothing():
    plain, busy = Training(), Training()
    for step in range(3):
        x, y = batch(step)
        plain.step(x, y)

        def loss(x=x, y=y):
            with torch.no_grad():
                busy.model(x[:3])
            return cross_entropy(busy.model(x), y)

        busy.optimizer.zero_grad()
        busy.model(x[:2])  # with gradients, but never differentiated
        loss().backward()
        busy.preconditioner.step(loss)
        with torch.no_grad():
            busy.model(x[:5])
        busy.optimizer.step()
        busy.model(x[:1])
    assert_alike(plain.blocks, busy.blocks, 1e-12)


def test_a_step_that_is_not_due_calls_no_closure():
    training = Training(refresh=natgrad.Refresh(factors=2, inverses=2))
    calls = []
    for step in range(4):
        x, y = batch(step)
        training.optimizer.zero_grad()
        cross_entropy(training.model(x), y).backward()
        training.preconditioner.step(
            None if step % 2 else lambda x=x, y=y: calls.append(1) or (cross_entropy(training.model(x), y), "outputs")
        )
        training.optimizer.step()
        training.optimizer.step()  # once is enough
    assert len(calls) == 2


def test_an_optimizer_of_both():
    plain, both = Training(), Training()
    joined = natgrad.PreconditionedOptimizer(both.optimizer, both.preconditioner)
    third = Training()
    alone = natgrad.PreconditionedOptimizer(third.optimizer, third.preconditioner)
    for step in range(3):
        x, y = batch(step)
        plain.step(x, y)

        def closure(x=x, y=y):
            joined.zero_grad()
            loss = cross_entropy(both.model(x), y)
            loss.backward()
            return loss

        assert joined.step(closure).requires_grad
        alone.zero_grad()
        loss = partial(lambda x, y: cross_entropy(third.model(x), y), x, y)
        loss().backward()
        alone.step(replay=loss)
    assert_alike(plain.blocks, both.blocks, 1e-12)
    assert_alike(plain.blocks, third.blocks, 1e-12)
