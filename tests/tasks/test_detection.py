"""Mask R-CNN on scenes and on COCO's layout."""

import copy
import itertools
import sys
import warnings

import pytest
import torch
from torch import nn

import natgrad
from natgrad import tasks
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.world import World
from tests.dense import reference as dense
from tests.tasks import folders

pytest.importorskip("torchvision")
pytest.importorskip("pycocotools")

from torchvision.models import resnet50
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import AnchorGenerator

from natgrad.tasks.detection import Detector, MeanPrecision, _mask_rcnn

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TASK = tasks.get("maskrcnn-coco")
DAMPING = 0.05


class Trunk(nn.Module):
    """One feature map of four channels, at a quarter of the resolution."""

    out_channels = 4

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2), nn.Tanh())

    def forward(self, pictures):
        return {"0": self.layers(pictures)}


def detector():
    """A Mask R-CNN in float64 that is small enough for the dense definition."""
    torch.manual_seed(0)
    network = MaskRCNN(
        Trunk(),
        min_size=96,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(((24, 48),), ((1.0,),)),
        rpn_post_nms_top_n_train=40,
        box_batch_size_per_image=24,
        box_head=TwoMLPHead(4 * 49, 6),
        box_predictor=FastRCNNPredictor(6, 11),
        mask_head=MaskRCNNHeads(4, (5,), 1),
        mask_predictor=MaskRCNNPredictor(5, 6, 11),
    )
    return Detector(network).double()


def batch(count=3):
    """The first scenes that have objects."""
    train, _ = TASK.datasets()
    chosen = [index for index in range(20) if len(train.source.picture(index)[1]["labels"])]
    return train[chosen[:count]]


def forward(model, inputs):
    """Return the model's outputs; which proposals are drawn depends on the seed."""
    torch.manual_seed(3)
    return model(inputs)


def by_definition(rows, count):
    """(G + γI)⁻¹ (Σ g aᵀ / n) (A + γI)⁻¹ of a term of n rows with g = n ∂L/∂s; rows with g = 0 are left out of A.

    With γ on both factors it depends on n, which cancels in G ⊗ A.
    """
    a, g = rows.a.flatten(1, 2), count * rows.g.flatten(1, 2)
    seen = a * (g != 0).any(-1, keepdim=True)
    A, G, W = seen.mT @ seen / count, g.mT @ g / count, g.mT @ a / count
    return dense.solve_inverse(W, A, G, DAMPING, pi=False)


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
def test_every_layer_of_the_heads_has_the_rows_of_its_own_terms_of_the_loss():
    model = detector()
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # the definition differentiates by what is before it
    inputs, targets = batch()
    layers = dict.fromkeys(TASK.curvature_layers, natgrad.KFAC(form="inverse", pi=False))
    preconditioner = natgrad.Preconditioner(model, layers, damping=DAMPING, reduction=TASK.reduction)
    outputs = forward(model, inputs)
    TASK.loss(outputs, targets).backward()
    preconditioner.step(count=TASK.count_outputs(outputs))

    seen = {}
    plain.network.roi_heads.box_predictor.register_forward_hook(lambda *args: seen.update(box=len(args[1][0])))
    plain.network.roi_heads.mask_head.register_forward_hook(lambda *args: seen.update(mask=len(args[1][0])))
    rows = dense.capture(plain, lambda model: TASK.loss(forward(model, inputs), targets))
    assert 0 < seen["mask"] < seen["box"] <= 3 * 24
    counts = {"box_": seen["box"], "mask_head": seen["mask"] * 14**2, "mask_predictor": seen["mask"] * 28**2}
    covered = {
        name: by_definition(rows[name], count)
        for name in rows
        for part, count in counts.items()
        if f"roi_heads.{part}" in name
    }
    assert len(covered) == 7
    actual = dense.gradients(model)
    dense.assert_equal({name: actual[name] for name in covered}, covered)
    plain.zero_grad()
    TASK.loss(forward(plain, inputs), targets).backward()
    rest = {name: value for name, value in dense.gradients(plain).items() if name not in covered}
    assert len(rest) == 5
    dense.assert_equal({name: actual[name] for name in rest}, rest, tolerance=0)


def test_pictures_without_objects_leave_the_mask_head_as_it_is():
    model = detector()
    layers = dict.fromkeys(TASK.curvature_layers, natgrad.KFAC())
    preconditioner = natgrad.Preconditioner(model, layers, damping=DAMPING, reduction=TASK.reduction)
    train, _ = TASK.datasets()
    empty = [index for index in range(40) if not len(train.source.picture(index)[1]["labels"])]
    for chosen in (empty[:2], [0, 1, 2], empty[:2]):
        model.zero_grad()
        inputs, targets = train[chosen]
        outputs = forward(model, inputs)
        TASK.loss(outputs, targets).backward()
        preconditioner.step(count=TASK.count_outputs(outputs))
        gradients = torch.cat([each.grad.flatten() for each in model.parameters()])
        assert gradients.isfinite().all()
        masked = [each.grad for each in model.network.roi_heads.mask_head.parameters()]
        assert all((each == 0).all() for each in masked) == (chosen != [0, 1, 2])


def test_the_model_is_torchvisions(tmp_path):
    published = 44_401_393
    theirs = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    ours = _mask_rcnn(91, None)
    assert [(name, value.shape) for name, value in ours.state_dict().items()] == [
        (name, value.shape) for name, value in theirs.state_dict().items()
    ]
    path = tmp_path / "resnet50.pth"
    weights = resnet50().state_dict()
    torch.save(weights, path)
    ours = _mask_rcnn(91, str(path))
    assert sum(parameter.numel() for parameter in ours.parameters()) == published
    body = ours.backbone.body.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in body.items())
    assert {name.split(".")[0] for name, each in ours.backbone.body.named_parameters() if each.requires_grad} == {
        "layer2",
        "layer3",
        "layer4",
    }
    path.write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"backbone='.*resnet50.pth' is not allowed: .* a file of weights of torchvis"):
        _mask_rcnn(91, str(path))


@pytest.mark.parametrize("measure", ["bbox", "segm"])
def test_the_metric_is_one_for_what_is_there_and_less_for_other_masks(measure):
    _, test = TASK.datasets()
    _, objects = test[:8]
    found = [{**each, "scores": torch.rand(len(each["labels"])), "masks": each["masks"] > 0} for each in objects]
    metric = MeanPrecision(measure)
    metric.update(found, objects)
    assert metric.compute() == pytest.approx(1)
    metric.reset()
    metric.update([{**each, "masks": each["masks"].flip(2)} for each in found], objects)
    assert (metric.compute() == pytest.approx(1)) == (measure == "bbox")
    metric.reset()
    metric.update([{**each, "labels": each["labels"] % 10 + 1} for each in found], objects)
    assert metric.compute() == 0


def test_a_crowd_is_not_missed():
    objects = {
        "boxes": torch.tensor([[0.0, 0, 8, 8], [10, 10, 20, 20]]),
        "labels": torch.tensor([1, 1]),
        "iscrowd": torch.tensor([1, 0]),
    }
    found = {"boxes": objects["boxes"][1:], "labels": torch.tensor([1]), "scores": torch.tensor([0.9])}
    metric = MeanPrecision("bbox")
    metric.update([found], [objects])
    assert metric.compute() == pytest.approx(1)


@pytest.mark.parametrize("module", ["torchvision.models.detection", "pycocotools.mask"])
def test_without_a_package_the_task_says_what_to_install(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    name = module.partition(".")[0]
    with pytest.raises(natgrad.NatgradError, match=rf"needs {name}, as installed by: pip install 'natgrad\[vision\]'"):
        (TASK.load if name == "pycocotools" else TASK.model)()


def options(**values):
    return {"task": "maskrcnn-coco", "optimizer": "sgd", "learning_rate": 0.005, "batch_size": 3, **values}


def training(job, stop=lambda: False, save=None):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*left out", natgrad.NatgradWarning)
        return Training(job.resolved(), ALONE, observer=Silent(), stop=stop, save=save)


def test_natural_muon_knows_the_layers_nearest_to_the_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("natgrad.tasks.detection._mask_rcnn", lambda classes, backbone: detector().network.float())
    folders.coco(tmp_path)
    run = training(Job(task="maskrcnn-coco", data=str(tmp_path), task_options={"readers": 0}, batch_size=3, steps=1))
    moved = {row.parameter: row.curvature for row in run.preconditioner.explain().rows}
    assert run.run().status == "finished"
    assert {name for name, curvature in moved.items() if not curvature} >= {f"{name}.weight" for name in TASK.outputs}


@pytest.mark.parametrize("curvature", ["none", "kfac"])
def test_an_interrupted_run_on_a_folder_equals_a_whole_one(tmp_path, monkeypatch, curvature):
    monkeypatch.setattr("natgrad.tasks.detection._mask_rcnn", lambda classes, backbone: detector().network.float())
    folders.coco(tmp_path, count=9)
    readers = {"readers": 2 if curvature == "none" else 0}
    job = Job(**options(data=str(tmp_path), task_options=readers, curvature=curvature, epochs=2))
    whole = training(job)
    expected = whole.run()
    assert expected.status == "finished"
    asked, states = itertools.count(1), []
    first = training(job, stop=lambda: next(asked) >= 4, save=lambda run: states.append(run.state_dict()))
    assert first.run().status == "stopped"
    assert first.position.step == 5  # the second of the second epoch
    second = training(job)
    second.load_state_dict(states[0])
    assert [(point.step, point.loss, point.metric) for point in second.run().points] == [
        (point.step, point.loss, point.metric) for point in expected.points
    ]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
