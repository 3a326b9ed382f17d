"""Models that change, layers that rest, and what can be asked, under every placement: no hang, as in one process."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.distributed.jobs import place

PLACEMENTS = ["comm-opt", "mem-opt", "hybrid:0.5", "reduce-scatter", "dp"]
EXACT = PLACEMENTS[:-1]


class Tower(nn.Module):
    """Linear layers, of which a step may skip some."""

    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(depth)])
        self.head = nn.Linear(5, 3)

    def forward(self, x, skipped=()):
        for index, layer in enumerate(self.layers):
            if index not in skipped:
                x = layer(x).tanh()
        return self.head(x)


def tower():
    torch.manual_seed(0)
    return Tower().double()


def data(step, samples=12):
    generator = torch.Generator().manual_seed(300 + step)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


class Scene:
    """A training in which something happens; natgrad reduces, so that no wrapper needs to follow."""

    def __init__(self, placement, refresh=(1, 2)):
        self.model = tower()
        factors, inverses = refresh
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.preconditioner = natgrad.Preconditioner(
            self.model,
            optimizer=self.optimizer,
            damping=0.05,
            gradients="reduce",
            placement=placement,
            refresh=natgrad.Refresh(factors=factors, inverses=inverses),
        )

    def step(self, step, skipped=(), idle=()):
        rank, ranks = place()
        self.optimizer.zero_grad()
        x, y = data(step)
        working = [other for other in range(ranks) if other not in idle]
        if rank in working:
            own = working.index(rank)
            x, y = x.tensor_split(len(working))[own], y.tensor_split(len(working))[own]
            outputs = self.model(x, skipped)
            self.preconditioner.backward(cross_entropy(outputs, y), outputs)
        self.preconditioner.step()
        self.optimizer.step()

    def add(self, module):
        """Have the optimizer train new parameters."""
        self.optimizer.add_param_group({"params": list(module.parameters())})


def freeze_and_thaw(scene):
    for step in range(10):
        for parameter in scene.model.layers[1].parameters():
            parameter.requires_grad_(step not in (3, 4, 5))
        scene.step(step)


def replace(scene):
    for step in range(8):
        if step == 3:
            torch.manual_seed(1)
            scene.model.layers[2] = nn.Linear(5, 5).double()
            scene.add(scene.model.layers[2])
        if step == 5:
            torch.manual_seed(2)
            scene.model.head = nn.Linear(5, 3, bias=False).double()
            scene.add(scene.model.head)
        scene.step(step)


def leave_out(scene):
    for step in range(9):
        scene.step(step, skipped={0: [3], 1: [3], 2: [0, 3], 3: [], 4: [1, 2]}.get(step, [step % 4]))


def never_use(scene):
    for step in range(6):
        scene.step(step, skipped=[0, 2])


def evaluate_between(scene):
    for step in range(6):
        scene.model.eval()
        scene.model(data(50)[0])
        with torch.no_grad():
            scene.model(data(51)[0])
        if place()[0] == 0:
            scene.model(data(52)[0][:1])  # one rank alone
        scene.model.train()
        scene.step(step)


def idle_ranks(scene):
    for step in range(8):
        ranks = place()[1]
        scene.step(step, idle=[(step + shift) % ranks for shift in range(ranks // 2)])


SCENES = {
    scene.__name__: scene for scene in (freeze_and_thaw, replace, leave_out, never_use, evaluate_between, idle_ranks)
}


def play(name, placement, refresh=(1, 2)):
    scene = Scene(placement, refresh)
    SCENES[name](scene)
    return {key: value.clone() for key, value in scene.model.state_dict().items()}


@pytest.mark.some(3)
@pytest.mark.values
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_model_that_changes(ranks, placement, count, name):
    results = ranks.run(count, play, name, placement, limit=40)
    assert all(torch.equal(value, other[key]) for other in results for key, value in results[0].items())
    assert all(value.isfinite().all() for value in results[0].values())
    if placement in EXACT:
        # In the step of a replacement several ranks capture nothing, while one process does.
        several = name == "replace"
        expected = ranks.run(3, play, name, "comm-opt", limit=40)[0] if several else play(name, "comm-opt")
        for key, value in expected.items():
            assert float((results[0][key] - value).norm()) <= 1e-10 * float(value.norm()), key


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "reduce-scatter", "pipelined", "background"])
def test_factors_that_are_due_when_the_model_changes_stay_due(ranks, placement):
    """What was captured of the old layers is gone: as in one process the next step captures."""
    expected = play("freeze_and_thaw", "background" if placement == "background" else "comm-opt", (3, 1))
    for result in ranks.run(2, play, "freeze_and_thaw", placement, (3, 1)):
        for key, value in expected.items():
            assert float((result[key] - value).norm()) <= 1e-10 * float(value.norm()), key
