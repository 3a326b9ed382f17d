"""K-BFGS against its formulas written out block by block, and the inverses that it keeps."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad import kbfgs
from tests.dense import reference as dense

DAMPING = 0.05


class Reference:
    """K-BFGS of one block, of textbook formulas: update H_G Ŵ H_A (Goldfarb 2020)."""

    def __init__(self, outputs, inputs, damping, limit=None):
        self.root, self.limit = damping**0.5, limit
        self.A, self.W = torch.zeros(inputs, inputs).double(), torch.zeros(outputs, inputs).double()
        self.captures = self.steps = 0
        self.H_A, self.pairs = None, []
        self.H_G = torch.eye(outputs).double()
        self.s, self.y = torch.zeros(outputs).double(), torch.zeros(outputs).double()

    def capture(self, a):
        self.A = 0.9 * self.A + 0.1 * torch.stack([torch.outer(row, row) for row in a]).mean(0)
        self.captures += 1
        self.a = a.mean(0)

    def renew(self):
        A = self.A / (1 - 0.9**self.captures) + self.root * torch.eye(len(self.A)).double()
        if self.H_A is None:
            self.H_A = torch.linalg.inv(A)
            return
        s = self.H_A @ self.a
        self.H_A = update(self.H_A, s, A @ s)

    def direction(self, W):
        self.W, self.steps = 0.9 * self.W + 0.1 * W, self.steps + 1
        return self.H_G @ self.W @ self.H_A / (1 - 0.9**self.steps)

    def replay(self, z_change, g_change):
        self.s, self.y = 0.9 * self.s + 0.1 * z_change, 0.9 * self.y + 0.1 * g_change

    def update_outputs(self):
        s, y, H = self.s, self.y, self.H_G
        yHy, sy = y @ H @ y, s @ y
        if sy < 0.2 * yHy:
            theta = 0.8 * yHy / (yHy - sy)
            s = theta * s + (1 - theta) * H @ y
        sy, ss = s @ y, s @ s
        if sy < self.root * ss:
            theta = (1 - self.root) * ss / (ss - sy)
            y = theta * y + (1 - theta) * s
        if s @ y > 0:
            self.pairs = [*self.pairs, (s, y)][-(self.limit or 10**6) :]
        self.H_G = torch.eye(len(s)).double()
        for pair in self.pairs:
            self.H_G = update(self.H_G, *pair)


def update(H, s, y):
    """BFGS in its product form."""
    rho, unit = 1 / (s @ y), torch.eye(len(s)).double()
    left = unit - rho * torch.outer(s, y)
    return left @ H @ left.T + rho * torch.outer(s, s)


class Positions(nn.Module):
    """Linear layers on positions, one of them used twice, and grouped convolutions with and without a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2)
        self.second = nn.Conv1d(6, 4, 2, dilation=2, bias=False)
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        x = self.second(self.first(x).tanh()).tanh().mT
        return self.head(self.shared(self.shared(x).tanh()).tanh().mean(1))


class Images(nn.Module):
    """Convolutions in two and three dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.flat = nn.Conv2d(2, 4, (2, 3), padding_mode="circular", padding=1, groups=2)
        self.deep = nn.Conv3d(1, 3, 2, stride=2)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = self.flat(x.unflatten(-1, (3, 3))).tanh()
        return self.head(self.deep(x[:, None]).tanh().flatten(2).mean(2))


def batch(step, channels=4):
    generator = torch.Generator().manual_seed(10 + step)
    x = torch.randn(6, channels, 9, generator=generator, dtype=torch.float64) + 0.5
    return x, torch.randint(3, (6,), generator=generator)


def total(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


def seen(model, x, y):
    """Gradients and input rows, and means of the outputs and of their gradients, of each block of each layer."""
    model = dense.twin(model)
    outputs = {name: [] for name in dense.trained_layers(model)}
    for name, module in dense.trained_layers(model).items():
        module.register_forward_hook(
            lambda module, _, out, name=name: outputs[name].append(dense.output_rows(module, out.detach()))
        )
    rows = dense.capture(model, lambda model: total(model, x, y))
    z = {name: torch.cat(own, 2).flatten(1, 2).mean(1) for name, own in outputs.items()}
    a, g = ({name: getattr(own, side).flatten(1, 2) for name, own in rows.items()} for side in "ag")
    return {name: own.gradient() for name, own in rows.items()}, a, z, {name: own.mean(1) for name, own in g.items()}


def held(optimizer, module):
    """Return the two inverses of a layer."""
    state = optimizer.state[module.weight]
    if "S" not in state:
        return state["H_A"], state["H_G"]
    unit = torch.eye(state["S"].shape[-1]).to(state["S"]).expand(len(state["S"]), -1, -1)
    return state["H_A"], kbfgs.Compact(state["S"], state["Y"]).multiply(unit)


def step(optimizer, model, x, y, pieces=1):
    """Take a step on a batch, in equal pieces."""

    def closure():
        optimizer.zero_grad()
        losses = [total(model, *piece) / len(x) for piece in zip(x.chunk(pieces), y.chunk(pieces), strict=True)]
        for loss in losses:
            loss.backward()
        return sum(losses).detach()

    return optimizer.step(closure)


@pytest.mark.pairs
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("limit", [None, 3, 100])
@pytest.mark.parametrize("network", [Positions, Images])
def test_steps_equal_the_reference(network, limit, pieces):
    model = network().double()
    optimizer = natgrad.KBFGS(model, lr=0.2, damping=DAMPING, memory=limit)
    layers, references = dict(dense.trained_layers(model)), {}
    for number in range(9):
        x, y = batch(number, 2 if network is Images else 4)
        gradients, a, z, g = seen(model, x, y)
        if not references:
            shapes = {name: W.shape for name, W in gradients.items()}
            references = {
                name: [Reference(o, i, DAMPING, limit) for _ in range(n)] for name, (n, o, i) in shapes.items()
            }
        before, expected = dense.twin(model), {}
        for name, W in gradients.items():
            for block, reference in enumerate(references[name]):
                reference.capture(a[name][block])
                reference.renew()
            expected[name] = torch.stack([one.direction(W[block]) for block, one in enumerate(references[name])])
        loss = step(optimizer, model, x, y, pieces)
        torch.testing.assert_close(loss, total(before, x, y).detach() / len(x))
        for moved, start in zip(model.parameters(), before.parameters(), strict=True):
            start.grad = (start.detach() - moved.detach()) / 0.2
        dense.assert_equal(dense.gradients(before), expected, 1e-9)
        _, _, z_after, g_after = seen(model, x, y)
        for name, own in references.items():
            for block, reference in enumerate(own):
                reference.replay((z_after[name] - z[name])[block], (g_after[name] - g[name])[block])
                reference.update_outputs()
            H_A, H_G = held(optimizer, layers[name])
            dense.assert_equal({"A": H_A}, {"A": torch.stack([one.H_A for one in own])}, 1e-9)
            dense.assert_equal({"G": H_G}, {"G": torch.stack([one.H_G for one in own])}, 1e-9)


class Mixed(nn.Module):
    """A layer whose weight is tied, parameters of other kinds, and a frozen bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.tied, self.again, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.first(self.drop(x))).relu_()
        return self.head(self.again(self.tied(x)) * self.scale)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_other_parameters_move_as_by_sgd(momentum):
    model = Mixed().double()
    optimizer = natgrad.KBFGS(model, lr=0.1, momentum=momentum)
    others = dict(model.named_parameters())
    for name in ("first.weight", "first.bias", "head.weight", "head.bias"):
        del others[name]
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in others.items()}
    sgd = torch.optim.SGD(copies.values(), lr=0.1, momentum=momentum, dampening=momentum)
    for _ in range(4):
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        step(optimizer, model, x, y)
        for name, copy in copies.items():
            copy.grad = others[name].grad.clone()  # the second evaluation does not change it
        sgd.step()
        dense.assert_equal(others, copies, 1e-12)
    assert torch.equal(model.head.bias, Mixed().double().head.bias)


def test_the_second_evaluation_repeats_the_random_numbers_and_leaves_no_trace():
    model = Mixed().double()
    optimizer, masks = natgrad.KBFGS(model, lr=0.1), []
    model.drop.register_forward_hook(lambda module, args, output: masks.append(output.detach() != 0))
    step(optimizer, model, torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    first, second = masks
    assert torch.equal(first, second)
    assert model.norm.num_batches_tracked == 1
    assert not any(module._forward_hooks for module in model.modules() if module is not model.drop)


@pytest.mark.parametrize("memory", [None, 2])
def test_a_resumed_run_continues_bit_by_bit(tmp_path, memory):
    def run(model, optimizer, numbers):
        for number in numbers:
            step(optimizer, model, *batch(number))

    straight, first, second = Positions().double(), Positions().double(), Positions().double()
    run(straight, natgrad.KBFGS(straight, lr=0.2, memory=memory), range(8))
    optimizer = natgrad.KBFGS(first, lr=0.2, memory=memory)
    run(first, optimizer, range(4))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    resumed = natgrad.KBFGS(second, lr=0.7)
    second.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    run(second, resumed, range(4, 8))
    dense.assert_equal(second.state_dict(), straight.state_dict(), 0)


def test_several_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"^ranks=2 is not allowed: .*one process"):
        natgrad.KBFGS(nn.Linear(2, 2), lr=0.1)


def test_the_preconditioner_refers_to_the_optimizer():
    for curvature in ("kbfgs", {"*": "kbfgs"}):
        with pytest.raises(ValueError, match=r"natgrad\.KBFGS\(model, lr=\.\.\.\)"):
            natgrad.Preconditioner(nn.Linear(2, 2), curvature)


def quadratic(size, seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(2, size, size + 3, generator=generator, dtype=torch.float64)
    return root @ root.mT / size + 0.1 * torch.eye(size).double()


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_damped_pairs_have_curvature(sign):
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        H = quadratic(5, int(torch.randint(1000, (), generator=generator)))
        s, y = torch.randn(2, 2, 5, generator=generator, dtype=torch.float64)
        y = sign * y.abs() * s.sign()
        s, y = kbfgs.damped(s, y, kbfgs.multiply(H, y), 0.3)
        assert (kbfgs.inner(s, y) >= 0.3 * (1 - 1e-12) * kbfgs.inner(s, s)).all()


def test_lost_definiteness_begins_anew():
    broken = torch.diag(torch.tensor([-1.0, 1, 1])).double().expand(2, 3, 3)
    unit, shift = torch.eye(3).double(), DAMPING**0.5
    s, seen = torch.tensor([[1.0, 1, 0], [0, 1, 1]]).double(), torch.tensor([[1.0, 0, 0], [0, 1, 0]]).double()
    H = kbfgs.update_outputs({"H_G": broken}, s, seen, mu=shift)["H_G"]
    dense.assert_equal({"H": H[0]}, {"H": update(unit, s[0], seen[0])}, 1e-12)
    assert torch.linalg.eigvalsh(H[1]).min() < 0  # it was not seen in that direction

    A = quadratic(3, 7)
    H = kbfgs.update_inputs(A, seen, shift, broken)
    dense.assert_equal({"H": H[0]}, {"H": torch.linalg.inv(A[0] + shift * unit)}, 1e-12)
