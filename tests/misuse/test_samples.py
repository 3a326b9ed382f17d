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


def natural(model, *args, of=lambda outputs: outputs.square().sum(1).mean()):
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    of(model(*args)).backward()
    preconditioner.step()
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


class Called(nn.Module):
    """The same, called with one tuple of images and targets."""

    def __init__(self):
        super().__init__()
        self.detector = Detector()

    def forward(self, both):
        return self.detector(*both)


def test_targets_beside_a_list_in_a_tuple_tell_so_too():
    own = images()
    targets = [{"boxes": torch.zeros(1, 4)} for _ in own]
    expected = natural(Detector(), own, targets, of=lambda losses: losses["loss"] / 2)
    actual = natural(Called(), (own, targets), of=lambda losses: losses["loss"] / 2)
    dense.assert_equal({f"detector.{name}": value for name, value in expected.items()}, actual)


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
    """Classifies clouds of points of different sizes; the points of all clouds are one batch to its first layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.points, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.double()

    def forward(self, clouds):
        hidden = self.points(torch.cat(clouds)).tanh()
        return self.head(torch.stack([own.mean(0) for own in hidden.split([len(cloud) for cloud in clouds])]))


def test_the_layer_nearest_to_the_loss_decides_on_another_list_and_a_warning_says_so():
    generator = torch.Generator().manual_seed(1)
    clouds = [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (5, 4)]
    rows = dense.capture(dense.twin(Clouds()), lambda model: model(clouds).square().sum())
    expected = dense.KFAC(damping=0.05).step({"head": rows["head"]})
    with pytest.warns(natgrad.NatgradWarning, match=r"a list .* assumes the 2 samples .* but points has 9"):
        actual = natural(Clouds(), clouds, of=lambda outputs: outputs.square().sum() / 2)
    dense.assert_equal({"head": actual["head"]}, expected)
