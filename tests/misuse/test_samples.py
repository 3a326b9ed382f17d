"""How many samples a batch has, where the model is not called with one tensor."""

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

import natgrad
from tests.dense import reference as dense

pytestmark = pytest.mark.filterwarnings("error::natgrad.NatgradWarning")


class Detector(nn.Module):
    """Takes a list of images, and of targets in training, as torchvision's detection models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.double()

    def forward(self, images, targets=None):
        size = max(image.shape[1] for image in images), max(image.shape[2] for image in images)
        batch = torch.stack([pad(i, (0, size[1] - i.shape[2], 0, size[0] - i.shape[1])) for i in images])
        outputs = self.head(self.backbone(batch).tanh().mean((2, 3)))
        return outputs if targets is None else {"loss": sum(outputs[n].sum() ** 2 for n in range(len(images)))}


class Stacked(Detector):
    """The same, called with one tensor."""

    def forward(self, batch):
        return self.head(self.backbone(batch).tanh().mean((2, 3)))


def images(sizes=(7, 7)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 7, size, generator=generator, dtype=torch.float64) for size in sizes]


def natural(model, *args, of=lambda outputs: outputs.square().sum(1).mean(), count=None):
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    of(model(*args)).backward()
    preconditioner.step(count=count)
    return dense.gradients(model)


@pytest.mark.parametrize("sizes", [(7, 7), (7, 5)])
def test_images_in_a_list_are_counted(sizes):
    own = images(sizes)
    expected = natural(Stacked(), torch.stack([pad(image, (0, 7 - image.shape[2])) for image in own]))
    dense.assert_equal(natural(Detector(), own), expected)


def test_targets_tell_that_a_list_holds_samples():
    own = images()
    expected = natural(Stacked(), torch.stack(own), of=lambda outputs: outputs.sum(1).square().sum() / 2)
    targets = [{"boxes": torch.zeros(1, 4)} for _ in own]
    dense.assert_equal(natural(Detector(), own, targets, of=lambda losses: losses["loss"] / 2), expected)


class Two(nn.Module):
    """Two inputs of one batch, in a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 2), nn.Linear(4, 2)
        self.double()

    def forward(self, inputs):
        return self.first(inputs[0]) + self.second(inputs[1])


def test_inputs_in_a_list_are_one_batch():
    x, y = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    dense.assert_equal(natural(Two(), [x, y]), natural(Two(), (x, y)), tolerance=0)


class Clouds(nn.Module):
    """Classifies clouds of points of different sizes; the points of all clouds are one batch to its layers."""

    def __init__(self, pools):
        super().__init__()
        torch.manual_seed(0)
        self.pools, self.points, self.head = pools, nn.Linear(3, 4), nn.Linear(4, 2)
        self.double()

    def forward(self, clouds):
        sizes = [len(cloud) for cloud in clouds]
        hidden = self.points(torch.cat(list(clouds))).tanh()
        if self.pools:
            hidden = torch.stack([own.mean(0) for own in hidden.split(sizes)])
        return self.head(hidden)


def clouds():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (5, 4)]


def test_a_layer_that_sees_one_row_a_cloud_settles_how_many_there_are():
    model = dense.twin(Clouds(pools=True))
    rows = dense.capture(model, lambda model: model(clouds()).square().sum())
    expected = dense.KFAC(damping=0.05).step({"head": rows["head"]})
    actual = natural(Clouds(pools=True), clouds(), of=lambda outputs: outputs.square().sum() / 2)
    dense.assert_equal({"head": actual["head"]}, expected)


def test_samples_that_nothing_settles_are_refused_with_the_argument_that_does():
    model = Clouds(pools=False)
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    model(clouds()).square().mean().backward()
    before = dense.gradients(model)
    with pytest.raises(ValueError, match=r"count.*number of samples.*\[5, 3\], \[4, 3\]"):
        preconditioner.step()
    dense.assert_equal(dense.gradients(model), before, tolerance=0)
    preconditioner.step(count=2)
    assert preconditioner.metrics()["step"] == 1


def test_a_count_is_the_number_of_samples_of_an_ambiguous_batch():
    model = dense.twin(Clouds(pools=False))
    rows = dense.capture(model, lambda model: 2 * model(clouds()).square().sum() / 2)
    factors = {name: (own.a[0, :, 0], own.g[0, :, 0]) for name, own in rows.items()}
    expected = {}
    for name, (a, g) in factors.items():
        A, G = a.mT @ a / 2, g.mT @ g / 9  # of two samples with nine positions in all
        expected[name] = dense.solve_eigen((g.mT @ a / 2)[None], A[None], G[None], 0.05)
    actual = natural(Clouds(pools=False), clouds(), of=lambda outputs: outputs.square().sum() / 2, count=2)
    dense.assert_equal(actual, expected)
