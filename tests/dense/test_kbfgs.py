"""K-BFGS against its formulas written out block by block, and the inverses that it keeps."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad.curvature import quasi_newton
from tests.dense import reference as dense
from tests.device import here

EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)
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


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


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


def seen(model, x, y, sharing="expand"):
    """Gradients and input rows, and means of the outputs and of their gradients, of each block of each layer."""
    model = dense.twin(model)
    outputs = {name: [] for name in dense.trained_layers(model)}
    for name, module in dense.trained_layers(model).items():
        module.register_forward_hook(
            lambda module, _, out, name=name: outputs[name].append(dense.output_rows(module, out.detach()))
        )
    rows = dense.capture(model, lambda model: total(model, x, y))
    z = {name: torch.cat(own, 2).flatten(1, 2).mean(1) for name, own in outputs.items()}
    if sharing == "reduce":
        a, g = ({name: pool(own) for name, own in rows.items()} for pool in (lambda own: own.a.mean(2), summed))
    else:
        a, g = ({name: getattr(own, side).flatten(1, 2) for name, own in rows.items()} for side in "ag")
    return {name: own.gradient() for name, own in rows.items()}, a, z, {name: own.mean(1) for name, own in g.items()}


def summed(rows):
    return rows.g.sum(2)


def held(preconditioner, name):
    blocks = here(preconditioner.state_dict()["blocks"])[name if name.endswith("]") else f"{name}.weight"]
    if "S" not in blocks:
        return blocks["H_A"], blocks["H_G"]
    unit = torch.eye(blocks["S"].shape[-1]).to(blocks["S"]).expand(len(blocks["S"]), -1, -1)
    return blocks["H_A"], quasi_newton.Compact(blocks["S"], blocks["Y"]).multiply(unit)


@pytest.mark.pairs
@pytest.mark.parametrize("limit", [None, 3, 100])
@pytest.mark.parametrize("intervals", [(1, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("network", [Positions, Images])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_steps_equal_the_reference(network, intervals, limit, sharing):
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    refresh = natgrad.Refresh(factors=intervals[0], inverses=intervals[1])
    curvature = natgrad.KBFGS(memory=limit, sharing=sharing)
    preconditioner = natgrad.Preconditioner(
        model, curvature, optimizer=optimizer, damping=DAMPING, kl_clip=None, refresh=refresh
    )
    references, last_capture = {}, -1
    for step in range(9):
        x, y = batch(step, 2 if network is Images else 4)
        gradients, a, z, g = seen(model, x, y, sharing)
        if not references:
            shapes = {name: W.shape for name, W in gradients.items()}
            references = {
                name: [Reference(o, i, DAMPING, limit) for _ in range(n)] for name, (n, o, i) in shapes.items()
            }
        captures, renews = step % intervals[0] == 0, step % intervals[1] == 0
        expected = {}
        for name, W in gradients.items():
            for block, reference in enumerate(references[name]):
                if captures:
                    reference.capture(a[name][block])
                if renews:
                    reference.renew()
            expected[name] = torch.stack([one.direction(W[block]) for block, one in enumerate(references[name])])
        optimizer.zero_grad()
        (total(model, x, y) / len(x)).backward()
        preconditioner.step(lambda x=x, y=y: total(model, x, y) / len(x))
        dense.assert_equal(dense.gradients(model), expected, 1e-9)
        optimizer.step()
        _, _, z_after, g_after = seen(model, x, y, sharing)
        last_renewal = step - step % intervals[1]
        for name, own in references.items():
            for block, reference in enumerate(own):
                if captures:
                    reference.replay((z_after[name] - z[name])[block], (g_after[name] - g[name])[block])
                    if last_renewal > last_capture:
                        reference.update_outputs()
            H_A, H_G = held(preconditioner, name)
            dense.assert_equal({"A": H_A}, {"A": torch.stack([one.H_A for one in own])}, 1e-9)
            dense.assert_equal({"G": H_G}, {"G": torch.stack([one.H_G for one in own])}, 1e-9)
        last_capture = step if captures else last_capture


def changes(model, shape, steps, dtype, layers, **options):
    """How far the inverses of the outputs of some layers are from the identity after a few steps."""
    model = model.to(torch.promote_types(dtype, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KBFGS(**options), optimizer=optimizer, damping=1e-3, refresh=EVERY_STEP
    )
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(shape, generator=generator).to(next(model.parameters())) + 0.3
        y = torch.randint(3, shape[:1], generator=generator)

        def loss(x=x, y=y):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                return nn.functional.cross_entropy(model(x), y)

        optimizer.zero_grad()
        loss().backward()
        preconditioner.step(loss)
        optimizer.step()
    inverses = [held(preconditioner, layer)[1][0] for layer in layers]
    return [float((H - torch.eye(len(H)).to(H)).norm()) for H in inverses]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("memory", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_front_of_a_batch_normalisation_no_pair_is_made_of_rounding(dtype, memory, sharing):
    """Nothing changes when all outputs shift alike, so that mean(g) is zero but for rounding, and y is nothing else."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(2), nn.AvgPool1d(64), nn.Flatten(),
        nn.Linear(5, 3),
    )  # fmt: skip
    convolution, head = changes(model, (32, 2, 8, 8), 6, dtype, ("0", "6"), memory=memory, sharing=sharing)
    assert convolution == 0
    assert head > 0.1


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("memory", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_the_keys_of_attention_no_pair_is_made_of_rounding(dtype, memory, sharing):
    """A softmax does not see what all keys share, so that their gradients cancel within each sample."""
    torch.manual_seed(0)
    layers = [f"attention.in_proj_weight[{name}]" for name in ("query", "key", "value")]
    query, key, value = changes(Attention(), (8, 5, 6), 4, dtype, layers, memory=memory, sharing=sharing)
    assert key == 0
    assert min(query, value) > 0.1


@pytest.mark.values
@pytest.mark.parametrize("memory", [None, 6])
@pytest.mark.parametrize(("dtype", "steps"), [(torch.float64, 150), (torch.float32, 150)])
@pytest.mark.parametrize("rank", [1, 5])
def test_inverses_stay_positive_definite(dtype, steps, rank, memory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KBFGS(memory=memory), optimizer=optimizer, damping=1e-3, refresh=EVERY_STEP
    )
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(rank, 5, generator=generator).to(dtype)
    for step in range(steps):
        x = torch.randn(4, rank, generator=generator).to(dtype) @ basis * 10 ** (step % 3 - 1)
        y = torch.randint(3, (4,), generator=generator)

        def loss(x=x, y=y):
            return nn.functional.cross_entropy(model(x), y)

        optimizer.zero_grad()
        loss().backward()
        preconditioner.step(loss)
        optimizer.step()
        for name in ("0", "2", "4"):
            for H in held(preconditioner, name):
                assert torch.linalg.eigvalsh((H + H.mT).double() / 2).min() > 0
                assert (H - H.mT).norm() <= (0 if memory is None else 1e-4) * H.norm() or H.shape[-1] == 1
    assert preconditioner.metrics()["failed_decompositions"] == 0


def losses_around(spiked, *, memory, inputs=1.0, gain=1.0, activation=nn.ReLU):
    """Train on batches, some of them with scaled inputs or a scaled loss; the losses after the last of these."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 5))
    teacher, generator = torch.randn(20, 5), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        model, natgrad.KBFGS(memory=memory), optimizer=optimizer, damping=0.1, kl_clip=None, refresh=EVERY_STEP
    )
    losses = []
    for step in range(50):
        x = torch.randn(32, 20, generator=generator)
        y, scale = (x @ teacher).argmax(1), gain if step in spiked else 1.0
        x = x * inputs if step in spiked else x

        def loss(x=x, y=y, scale=scale):
            return nn.functional.cross_entropy(model(x), y) * scale

        optimizer.zero_grad()
        value = loss()
        value.backward()
        preconditioner.step(loss)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses[max(spiked) + 1 :], preconditioner.metrics()


@pytest.mark.values
@pytest.mark.parametrize("memory", [None, 10])
def test_one_batch_of_another_scale_changes_little(memory):
    losses, metrics = losses_around({30}, memory=memory, gain=1e3)
    usual, untouched = losses_around({30}, memory=memory)
    assert max(losses) < 1.2 * max(usual)
    assert metrics["bounded_gradients"] == 3
    assert untouched["skipped_factors"] == untouched["bounded_gradients"] == untouched["failed_decompositions"] == 0


def quadratic(size, seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(2, size, size + 3, generator=generator, dtype=torch.float64)
    return root @ root.mT / size + 0.1 * torch.eye(size).double()


def test_a_fixed_factor_keeps_its_inverse():
    curvature, A = natgrad.KBFGS(), quadratic(6, 0)
    generator = torch.Generator().manual_seed(1)
    inverse = torch.linalg.inv(A + DAMPING**0.5 * torch.eye(6).double())
    before = {"H_A": inverse}
    for _ in range(20):
        a = torch.randn(2, 6, generator=generator, dtype=torch.float64)
        before, fine = curvature.compute("A", {"A": A, "a": a}, DAMPING, before)
        assert fine.all()
    dense.assert_equal(before, {"H_A": inverse}, 1e-12)


def test_exact_pairs_lead_to_the_inverse():
    """With conjugate directions BFGS ends at the inverse after as many updates as there are dimensions."""
    A = quadratic(6, 2)
    H, gradient = torch.eye(6).double().expand(2, 6, 6), quadratic(6, 3)[:, 0]
    for _ in range(6):
        direction = quasi_newton.multiply(H, gradient)
        A_direction = quasi_newton.multiply(A, direction)
        rate = quasi_newton.inner(direction, gradient) / quasi_newton.inner(direction, A_direction)
        s, y = rate[:, None] * direction, rate[:, None] * A_direction
        H, gradient = quasi_newton.bfgs(H, s, y), gradient - y
    dense.assert_equal({"H": H}, {"H": torch.linalg.inv(A)}, 1e-8)


def test_a_long_memory_is_the_whole_matrix():
    generator = torch.Generator().manual_seed(4)
    S, Y = torch.zeros(2, 2, 10, 7, dtype=torch.float64)
    H = torch.eye(7).double().expand(2, 7, 7)
    for _ in range(10):
        s, y = torch.randn(2, 2, 7, generator=generator, dtype=torch.float64)
        s, y = quasi_newton.damped(s, y, quasi_newton.multiply(H, y), 0.1)
        H, S, Y = quasi_newton.bfgs(H, s, y), quasi_newton.append(S, s), quasi_newton.append(Y, y)
        X = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64)
        dense.assert_equal({"HX": quasi_newton.Compact(S, Y).multiply(X)}, {"HX": H @ X}, 1e-12)


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_damped_pairs_have_curvature(sign):
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        H = quadratic(5, int(torch.randint(1000, (), generator=generator)))
        s, y = torch.randn(2, 2, 5, generator=generator, dtype=torch.float64)
        y = sign * y.abs() * s.sign()
        s, y = quasi_newton.damped(s, y, quasi_newton.multiply(H, y), 0.3)
        assert (quasi_newton.inner(s, y) >= 0.3 * (1 - 1e-12) * quasi_newton.inner(s, s)).all()


def test_lost_definiteness_begins_anew():
    curvature = natgrad.KBFGS()
    broken = torch.diag(torch.tensor([-1.0, 1, 1])).double().expand(2, 3, 3)
    unit = torch.eye(3).double()
    s, seen = torch.tensor([[1.0, 1, 0], [0, 1, 1]]).double(), torch.tensor([[1.0, 0, 0], [0, 1, 0]]).double()
    made, fine = curvature.compute("G", {"s": s, "y": seen}, DAMPING, {"H_G": broken})
    assert fine.all()
    H = made["H_G"]
    dense.assert_equal({"H": H[0]}, {"H": update(unit, s[0], seen[0])}, 1e-12)
    assert torch.linalg.eigvalsh(H[1]).min() < 0  # it was not seen in that direction

    A = quadratic(3, 7)
    made, fine = curvature.compute("A", {"A": A, "a": seen}, DAMPING, {"H_A": broken})
    assert fine.all()
    H = made["H_A"]
    dense.assert_equal({"H": H[0]}, {"H": torch.linalg.inv(A[0] + DAMPING**0.5 * unit)}, 1e-12)


@pytest.mark.parametrize("memory", [None, 3])
def test_pairs_without_numbers_are_refused(memory):
    curvature = natgrad.KBFGS(memory=memory)
    s, y = torch.ones(2, 4), torch.ones(2, 4)
    before, _ = curvature.compute("G", {"s": 0 * s, "y": 0 * y}, DAMPING)
    y[1] = float("nan")
    _, fine = curvature.compute("G", {"s": s, "y": y}, DAMPING, before)
    assert fine.tolist() == [True, False]
