"""What stays behind: in memory while a preconditioner lives, on the model when it ends, in the user's own settings."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.classifier import FISHERS, batch, differentiate, gradients, network, precondition


@pytest.mark.values
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


@pytest.fixture
def few_objects():
    """Leave what the tests before have made out of what the garbage collector looks at, which takes it seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes():
    """What all tensors known to the garbage collector hold, each storage once."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]  # no compiler's fakes
    tensors = [one for one in tensors if not torch._is_functional_tensor(one) and one.device.type == "cpu"]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.usefixtures("few_objects")
@pytest.mark.values
@pytest.mark.filterwarnings("ignore:natgrad. the cross-entropy of each")  # no loss is divided here
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
