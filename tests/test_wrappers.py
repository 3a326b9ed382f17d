"""What people really do around a model: scaling, accumulating, copying, replacing, and what hooks keep meanwhile."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

import natgrad
from tests.dense import reference as dense

SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}
FISHERS = [{}, {"sharing": "reduce"}, SAMPLED]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Sequential(nn.Linear(12, 5), nn.Tanh()), nn.Linear(5, 3)
    ).double()


def batch(step, samples=6):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 2, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def precondition(model, curvature=None, *, factors=1, inverses=1, **options):
    return natgrad.Preconditioner(
        model,
        natgrad.KFAC(**(curvature or {})),
        damping=0.1,
        refresh=natgrad.Refresh(factors=factors, inverses=inverses),
        **options,
    )


def differentiate(preconditioner, model, step):
    x, y = batch(step)
    outputs = model(x)
    loss = cross_entropy(outputs, y)
    preconditioner.backward(loss, outputs)
    return loss


def train(model, steps, *, before=None, optimizer=None, preconditioner=None):
    """Train; `before` is called with the step first."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = preconditioner or precondition(model, optimizer=optimizer)
    for step in steps:
        if before is not None:
            before(step)
        optimizer.zero_grad()
        differentiate(preconditioner, model, step)
        preconditioner.step()
        optimizer.step()
    return preconditioner


def blocks(preconditioner):
    return copy.deepcopy(preconditioner.state_dict()["blocks"])


def assert_same(actual, expected, tolerance=1e-10):
    """Nested dicts of tensors are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(actual[name], value, tolerance)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=name)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# --- Scaled losses and narrow dtypes ------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", FISHERS)
def test_the_scale_of_the_loss_changes_nothing(curvature):
    results = []
    for scaled in (False, True):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preconditioner = precondition(model, curvature, optimizer=optimizer, scaler=scaler if scaled else None)
        for step in range(5):
            optimizer.zero_grad()
            x, y = batch(step)
            outputs = model(x)
            preconditioner.backward(scaler.scale(cross_entropy(outputs, y)), outputs)
            scaler.unscale_(optimizer)
            preconditioner.step()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0**12 if scaled else 1.0)
        results.append({"model": model.state_dict(), "blocks": blocks(preconditioner)})
    assert_same(*results)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_of_infinite_gradients_leaves_the_factors(depth):
    """Also those of layers between the loss and where gradients leave the range, whose own are finite."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = precondition(model, optimizer=optimizer, scaler=scaler)
    for step in range(4):
        before, weights = blocks(preconditioner), copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        x, y = batch(step)
        for index, layer in enumerate(model):
            x = layer(x)
            if step == 2 and index == len(model) - 1 - depth:
                x.register_hook(lambda gradient: gradient * float("inf"))
        scaler.scale(cross_entropy(x, y)).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert_same(blocks(preconditioner), before, 0)
            assert_same(model.state_dict(), weights, 0)
    assert scaler.get_scale() == 2.0**9
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("curvature", FISHERS)
def test_autocast(dtype, curvature):
    """The natural gradient under autocast is that in float32, up to the rounding of the dtype."""
    found = []
    for enabled in (False, True):
        model = network().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preconditioner = precondition(model, curvature, optimizer=optimizer, scaler=scaler, kl_clip=None)
        x, y = batch(0, samples=64)
        with torch.autocast("cpu", dtype, enabled=enabled):
            outputs = model(x.float())
            loss = cross_entropy(outputs, y)
        preconditioner.backward(scaler.scale(loss), outputs)
        scaler.unscale_(optimizer)
        preconditioner.step()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        assert found[-1].dtype == torch.float32
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert error < (0.03 if dtype == torch.bfloat16 else 0.004) * (10 if curvature is SAMPLED else 1)


# --- The order and the number of calls ----------------------------------------------------------------------------


def test_gradients_may_be_zeroed_in_place():
    results = []
    for to_none in (True, False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preconditioner = precondition(model, optimizer=optimizer)
        for step in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            differentiate(preconditioner, model, step)
            preconditioner.step()
            optimizer.step()
        results.append(model.state_dict())
    assert_same(*results)


def test_a_closure():
    expected, model = network(), network()
    train(expected, range(4))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = precondition(model, optimizer=inner)
    optimizer = natgrad.PreconditionedOptimizer(inner, preconditioner)
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            return differentiate(preconditioner, model, step)

        assert optimizer.step(closure).requires_grad
    assert_same(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("interval", [1, 3])
def test_a_second_step_leaves_natural_gradients(interval):
    model = network()
    preconditioner = precondition(model, factors=interval, inverses=interval)
    for step in range(3):
        model.zero_grad()
        differentiate(preconditioner, model, step)
        preconditioner.step()
        natural, state = gradients(model), blocks(preconditioner)
        with pytest.warns(natgrad.NatgradWarning, match="without a backward pass"):
            preconditioner.step()
        assert_same(gradients(model), natural, 0)
        assert_same(blocks(preconditioner), state, 0)
        assert preconditioner.metrics()["step"] == step + 1


@pytest.mark.parametrize("assign", ["new", "copied"])
def test_gradients_set_by_hand_are_preconditioned(assign):
    model = network()
    preconditioner = precondition(model, factors=10, inverses=10, kl_clip=None)
    differentiate(preconditioner, model, 0)
    plain = gradients(model)
    preconditioner.step()
    natural = gradients(model)
    for name, parameter in model.named_parameters():
        if assign == "new":
            parameter.grad = plain[name].clone()
        else:
            parameter.grad.copy_(plain[name])
    preconditioner.step()
    assert_same(gradients(model), natural)


@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_losses_of_one_forward_pass_make_one_sum(accumulation):
    """Of the Fisher too, as that of independent labels: F = F₁ + F₂."""
    model = network()
    reference = dense.twin(model)
    preconditioner = precondition(model, accumulation=accumulation, kl_clip=None)
    x, y = batch(0)
    losses = [
        lambda outputs: cross_entropy(outputs, y, reduction="sum"),
        lambda outputs: outputs.square().sum() + outputs.exp().sum(),
    ]
    outputs = model(x)
    for loss in losses:
        (loss(outputs) / len(x)).backward(retain_graph=True)
    preconditioner.step()
    rows = [dense.capture(reference, lambda model, loss=loss: loss(model(x))) for loss in losses]
    expected = {}
    for name, first in rows[0].items():
        second = rows[1][name]
        A, G = first.factors()[0], first.factors()[1] + second.factors()[1]
        expected[name] = dense.solve_eigen(first.gradient() + second.gradient(), A, G, 0.1)
    dense.assert_equal(dense.gradients(model), expected)


def test_two_heads_whose_losses_are_differentiated_one_by_one():
    """The second pass reaches a layer that the first has not: still one forward pass, not two accumulations."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(10, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            hidden = self.trunk(x.flatten(1)).tanh()
            return self.left(hidden), self.right(hidden)

    found = []
    for together in (True, False):
        torch.manual_seed(0)
        model = Heads().double()
        preconditioner = precondition(model, kl_clip=None)
        x, y = batch(0)
        losses = [cross_entropy(outputs, y) for outputs in model(x)]
        if together:
            sum(losses).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        preconditioner.step()
        found.append(gradients(model))
    for name in ("left.weight", "left.bias", "right.weight", "right.bias"):
        torch.testing.assert_close(found[1][name], found[0][name])


# --- Gradients that were thrown away ------------------------------------------------------------------------------


class Rivals:
    """A generator and a discriminator, each with an optimizer and a preconditioner."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out)).double() for out in (3, 1)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in self.models]
        self.preconditioners = [
            precondition(model, optimizer=optimizer, **options)
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]

    def play(self, steps, *, to_none, discard, passes):
        """Let each learn in turn, the discriminator from one or two backward passes; return all parameters."""
        (generator, discriminator), random = self.models, torch.Generator().manual_seed(1)
        for _ in range(steps):
            real, noise = torch.randn(2, 6, 3, generator=random, dtype=torch.float64)
            fake = generator(noise)
            if discard:
                self.preconditioners[1].discard()
            self.optimizers[1].zero_grad(set_to_none=to_none)
            losses = [softplus(-discriminator(real)).mean() / 2, softplus(discriminator(fake.detach())).mean() / 2]
            for loss in [sum(losses)] if passes == 1 else losses:
                loss.backward()
            self.preconditioners[1].step()
            self.optimizers[1].step()
            self.optimizers[0].zero_grad(set_to_none=to_none)
            softplus(-discriminator(fake)).mean().backward()
            self.preconditioners[0].step()
            self.optimizers[0].step()
        return {f"{index}": vector(model) for index, model in enumerate(self.models)}


def vector(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_pass_of_a_rivals_loss_counts_for_nothing(passes, interval):
    """As if `discard` had been called: what ``zero_grad`` has thrown away is no gradient."""
    options = {"factors": interval, "inverses": interval}
    expected = Rivals(**options).play(4, to_none=True, discard=True, passes=passes)
    assert_same(Rivals(**options).play(4, to_none=True, discard=False, passes=passes), expected, 0)
    assert_same(Rivals(**options).play(4, to_none=False, discard=True, passes=passes), expected)


@pytest.mark.parametrize("curvature", FISHERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_first_pass_of_sharpness_aware_minimization_counts_for_nothing(curvature, reduction):
    results = []
    for first in (False, True):
        model = network()
        preconditioner = precondition(model, curvature, reduction=reduction, kl_clip=None)
        for step in (7, 0) if first else (0,):
            model.zero_grad()
            preconditioner._sampler._last = (-1, 0)  # the labels are the same, first or not
            x, y = batch(step)
            outputs = model(x)
            preconditioner.backward(cross_entropy(outputs, y, reduction=reduction), outputs)
        preconditioner.step()
        results.append({"gradients": gradients(model), "blocks": blocks(preconditioner)})
    assert_same(results[1], results[0], 0)


@pytest.mark.parametrize("way", ["torch.autograd.grad", "one forward pass"])
def test_gradients_that_are_added_by_hand_are_not_thrown_away(way):
    """Though ``.grad`` is None before the second pass, as it is where gradients of several tasks are reconciled."""
    results = []
    for by_hand in (False, True):
        model = network()
        preconditioner = precondition(model, kl_clip=None)
        parameters, found = list(model.parameters()), []
        outputs = model(batch(0)[0])
        others = outputs if way == "one forward pass" else model(batch(1)[0])
        for loss in (outputs.square().sum(1).mean() / 2, others.exp().sum(1).mean() / 2):
            if by_hand and way == "torch.autograd.grad":
                found.append(torch.autograd.grad(loss, parameters))
                continue
            loss.backward(retain_graph=True)
            if by_hand:
                found.append([parameter.grad for parameter in parameters])
                model.zero_grad()
        for parameter, *own in zip(parameters, *found, strict=True) if by_hand else ():
            parameter.grad = sum(own)
        preconditioner.step()
        results.append({"gradients": gradients(model), "blocks": blocks(preconditioner)})
    assert_same(*results)


@pytest.mark.parametrize("interval", [1, 5])
def test_gradients_written_through_data_are_preconditioned(interval):
    """Their version counters tell nothing."""
    model = network()
    preconditioner = precondition(model, factors=interval, inverses=interval, kl_clip=None)
    differentiate(preconditioner, model, 0)
    preconditioner.step()
    for step in range(1, 7):
        x, y = batch(step)
        raw = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), raw, strict=True):
            parameter.grad.data.copy_(gradient)
        preconditioner.step()
        assert not any(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), raw, strict=True))
        assert preconditioner.metrics()["step"] == step + 1
    assert preconditioner.metrics()["factor_updates"] == (7 if interval == 1 else 2)


@pytest.mark.parametrize("curvature", FISHERS)
def test_activations_in_place(curvature):
    """After a linear layer with positions too, whose output is a view: an operation in place drops the hooks of it."""
    results = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=inplace), nn.Flatten(), nn.Linear(8, 3)).double()
        preconditioner = precondition(model, curvature, kl_clip=None)
        differentiate(preconditioner, model, 0)
        preconditioner.step()
        results.append({"gradients": gradients(model), "blocks": blocks(preconditioner)})
    assert float(results[0]["blocks"]["0.weight"]["weight"]) > 0
    assert_same(*results)


# --- A model that changes -----------------------------------------------------------------------------------------


def test_a_group_added_later_is_clipped_with_its_own_rate():
    def run(split):
        model = network()
        head = list(model[4].parameters())
        rest = [parameter for parameter in model.parameters() if all(parameter is not one for one in head)]
        groups = [{"params": rest}] if split else [{"params": rest}, {"params": head, "lr": 0.3}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=0.1, kl_clip=1e-6)
        if split:
            optimizer.add_param_group({"params": head, "lr": 0.3})
        train(model, range(3), optimizer=optimizer, preconditioner=preconditioner)
        return model.state_dict()

    assert_same(run(split=True), run(split=False))


def test_a_frozen_part_thawed_later():
    """It is captured from then on; what was captured before stays."""
    model = network()
    model[0].requires_grad_(False)
    preconditioner = train(model, range(2))
    before = blocks(preconditioner)
    assert "0.weight" not in before
    model[0].requires_grad_(True)
    preconditioner.state_dict()
    train(model, range(2, 4), preconditioner=preconditioner)
    after = blocks(preconditioner)
    assert after.keys() == before.keys() | {"0.weight"}
    assert float(after["4.weight"]["weight"]) > float(before["4.weight"]["weight"])
    assert float(after["0.weight"]["weight"]) > 0


def swap_layer(model):
    model[4] = nn.Linear(5, 3).double()


def swap_parent(model):
    model[3] = nn.Sequential(nn.Linear(12, 5), nn.Tanh()).double()


def add_layer(model):
    model.append(nn.Linear(3, 3).double())


@pytest.mark.parametrize(
    ("change", "fresh", "updates"),
    [(swap_layer, "4.weight", 5), (swap_parent, "3.0.weight", 5), (add_layer, "5.weight", 2)],
)
def test_modules_replaced_or_added_later(change, fresh, updates):
    """The coming step notices, the one after captures; a block of the same name and shape goes on with its averages."""
    model = network()
    preconditioner = train(model, range(3))
    before = blocks(preconditioner)
    torch.manual_seed(3)
    change(model)
    train(model, [3], preconditioner=preconditioner)
    assert_same({"0.weight": blocks(preconditioner)["0.weight"]}, {"0.weight": before["0.weight"]}, 0)
    train(model, [4, 5], preconditioner=preconditioner)
    after = blocks(preconditioner)
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv1d))}
    assert after.keys() == names
    assert all(float(block["weight"]) > 0 for block in after.values())
    assert float(after["0.weight"]["weight"]) > float(before["0.weight"]["weight"])
    assert float(after[fresh]["weight"]) == pytest.approx(1 - 0.95**updates)


def through_a_file(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_a_file])
@pytest.mark.parametrize("curvature", [{}, SAMPLED])
def test_a_copy_is_inert_and_the_original_goes_on(duplicate, curvature):
    expected, model = network(), network()
    train(expected, range(4), preconditioner=precondition(expected, curvature))
    preconditioner = precondition(model, curvature)
    train(model, range(2), preconditioner=preconditioner)
    twin = duplicate(model)
    assert_same(twin.state_dict(), model.state_dict(), 0)
    for step in range(2, 4):
        twin(batch(9)[0]).sum().backward()
        train(model, [step], preconditioner=preconditioner)
    assert_same(model.state_dict(), expected.state_dict())
    other = precondition(twin, curvature)  # the copy may have one of its own
    train(twin, range(2), preconditioner=other)
    assert all(float(block["weight"]) > 0 for block in blocks(other).values())


def test_another_dtype_between_steps():
    """float64 → float32 → bfloat16: the averages go with the parameters, as far as the precision says."""
    model = network()
    preconditioner = precondition(model, kl_clip=None)
    for step, dtype in enumerate([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float64]):
        model.to(dtype)
        model.zero_grad()
        x, y = batch(step)
        cross_entropy(model(x.to(dtype)).double(), y).backward()
        preconditioner.step()
        for parameter in model.parameters():
            assert parameter.grad.dtype == dtype
            assert parameter.grad.isfinite().all()
    assert preconditioner.metrics()["factor_updates"] == 5


# --- What hooks keep ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", FISHERS)
@pytest.mark.parametrize("ending", ["backward", "no backward", "no gradients", "exception", "exception in backward"])
def test_no_activation_outlives_its_graph(curvature, ending):
    """Without the help of the garbage collector: there are no reference cycles."""
    model = network()
    preconditioner = precondition(model, curvature)
    inputs = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            module.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0])))

    def fail(*args):
        raise KeyError("on purpose")

    def run():
        x, y = batch(0)
        if ending == "no gradients":
            with torch.no_grad():
                model(x.clone())
            return
        outputs = model(x.clone())
        if ending.startswith("exception"):
            outputs.register_hook(fail)
        if ending != "no backward":
            preconditioner.backward(cross_entropy(outputs, y), outputs)

    gc.collect()
    gc.disable()
    try:
        if ending == "exception":
            handle = model[3].register_forward_hook(fail)
        if ending.startswith("exception"):
            with pytest.raises(KeyError):
                run()
        else:
            run()
        if ending == "exception":
            handle.remove()
        assert inputs
        assert not any(known() is not None for known in inputs)
        assert not [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (6, 12)]
    finally:
        gc.enable()
    model.zero_grad()
    differentiate(preconditioner, model, 1)  # and the next batch goes as ever
    preconditioner.step()


def live_bytes():
    """What all tensors known to the garbage collector hold, each storage once."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]  # no compiler's fakes
    tensors = [one for one in tensors if not torch._is_functional_tensor(one) and one.device.type == "cpu"]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("curvature", FISHERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_memory_is_flat_in_the_number_of_micro_batches(curvature, reduction):
    model = network()
    preconditioner = precondition(model, curvature, factors=2, reduction=reduction)
    for step in range(2):  # one with statistics, one without
        model.zero_grad()
        held = []
        for micro in range(6):
            differentiate(preconditioner, model, 10 * step + micro)
            gradients(model)  # the garbage collector knows no gradient that Python has not seen
            held.append(live_bytes())
        assert len(set(held)) == 1, held
        preconditioner.step()


def test_a_layer_called_after_an_exception_belongs_to_no_batch():
    model = network()
    preconditioner = precondition(model, kl_clip=None)
    handle = model[2].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(0)[0])
    handle.remove()
    x = torch.randn(12, 5, dtype=torch.float64)
    reference = dense.twin(model)
    model[4](x).square().sum(1).mean().backward()
    preconditioner.step()
    rows = dense.capture(reference, lambda model: model[4](x).square().sum())
    expected = dense.KFAC(damping=0.1).step(rows)
    dense.assert_equal({"4": dense.gradients(model)["4"]}, {"4": expected["4"]})


# --- The end of a preconditioner ------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Hooks of modules, and forwards in place of theirs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.cell, self.linear = nn.GRUCell(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(self.cell(self.attention(x, x, x)[0][:, 0]))


def traces(model):
    """What hooks and forwards of natgrad's there are."""
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return hooks + [module.forward for module in model.modules() if "forward" in vars(module)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("end", ["detach", "delete", "warning"])
def test_nothing_stays_on_the_model(end):
    model = Attending()
    if end == "warning":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(natgrad.NatgradWarning, match="typo"):
                natgrad.Preconditioner(model, {"typo": natgrad.KFAC(), "*": natgrad.KFAC()})
        assert not traces(model)
        return
    preconditioner = natgrad.Preconditioner(model)
    model(torch.randn(2, 3, 4)).sum().backward()
    assert len(traces(model)) == 2 + 1 + 2
    if end == "detach":
        preconditioner.detach()
        assert preconditioner.state_dict()["step"] == 0
        with pytest.raises(natgrad.NatgradError, match="detach"):
            preconditioner.step()
    gc.disable()
    try:
        del preconditioner
        assert not traces(model)
    finally:
        gc.enable()
    torch.jit.script(model.cell)
    natgrad.Preconditioner(model)


def test_a_default_device_is_for_the_users_tensors():
    model, (x, y) = network(), batch(0)
    torch.set_default_device("meta")
    try:
        preconditioner = precondition(model, SAMPLED)
        outputs = model(x)
        preconditioner.backward(cross_entropy(outputs, y), outputs)
        preconditioner.step()
        assert preconditioner.state_dict()["blocks"]["4.weight"]["renewed"].device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_forgotten_unscale_is_refused_and_leaves_the_gradients():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device="cpu")
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, scaler=scaler)
    scaler.scale(model(torch.randn(6, 2, 5, dtype=torch.float64)).square().mean()).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(natgrad.NatgradError, match="unscale_"):
        preconditioner.step()
    assert all(a.equal(b.grad) for a, b in zip(before, model.parameters(), strict=True))
    scaler.unscale_(optimizer)
    preconditioner.step()
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    scaler.update()
    both.zero_grad()
    scaler.scale(model(torch.randn(6, 2, 5, dtype=torch.float64)).square().mean()).backward()
    scaler.step(both)  # unscales by itself
    assert preconditioner.metrics()["step"] == 2


def test_one_optimizer_of_two_must_be_of_one_model():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer)
    with pytest.raises(ValueError, match="the one that the preconditioner was given"):
        natgrad.PreconditionedOptimizer(torch.optim.Adam(model.parameters()), preconditioner)
    preconditioner.detach()
    unknown = natgrad.Preconditioner(model)
    with pytest.raises(ValueError, match="one of the preconditioner's model"):
        natgrad.PreconditionedOptimizer(torch.optim.Adam(nn.Linear(2, 2).parameters()), unknown)


def test_a_second_preconditioner_of_a_model_warns_while_the_first_lives():
    model = network()
    first, second = natgrad.Preconditioner(model), natgrad.Preconditioner(model)
    model(torch.randn(6, 2, 5, dtype=torch.float64)).square().mean().backward()
    with pytest.warns(natgrad.NatgradWarning, match="another Preconditioner"):
        second.step()
    first.detach()
    second = natgrad.Preconditioner(model)  # its forerunner dies with its name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(6, 2, 5, dtype=torch.float64)).square().mean().backward()
        second.step()


def test_tables_print_as_plain_text(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    text = str(natgrad.Preconditioner(network()).explain())
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 90


@pytest.mark.parametrize("curvature", FISHERS)
def test_no_activation_outlives_the_backward_pass_while_the_loss_does(curvature):
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    preconditioner = precondition(model, curvature)
    outputs = model(torch.randn(13, 7, dtype=torch.float64))
    loss = cross_entropy(outputs, torch.zeros(13, dtype=torch.long))
    preconditioner.backward(loss, outputs)
    del outputs
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is torch.Tensor and tuple(one.shape) in {(13, 7), (13, 9)}]
    assert loss.grad_fn is not None
    assert not [one for one in kept if one.untyped_storage().nbytes() >= 13 * 7 * 8]
