"""The recipes that come with natgrad, and files of one's own."""

from fnmatch import fnmatchcase

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from natgrad import recipes, tasks
from natgrad.training import recipe
from natgrad.training.build import build_scheduler, rehearse
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
NODES = {"workers": 2, "nodes": 2}  # for DASO

# Two steps take minutes, or need torchvision.
NEED_TORCHVISION = (
    *("resnet50-imagenet", "resnet101-imagenet", "resnet152-imagenet"),
    *("maskrcnn-coco", "multiscale-cityscapes"),
)
LARGE = ("vgg16-cifar100", "resnet110-cifar10", "densenet-cifar100", *NEED_TORCHVISION)

PAIRS = [
    (name, task)
    for name in recipe.names()
    for task in dict.fromkeys(task for section in recipe.read(name) for task in section["tasks"])
    if task != "*"
]


def job(name, task, **given):
    return Job.from_json(recipe.apply(name, {"task": task, **given}))


def test_the_papers_have_files():
    assert {"daso2021", "hylo2022", "large-batch", "osawa2019", "pauloski2022", "zhang2022"} == set(recipe.names())


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_a_recipe_names_tasks_and_builds(name, task):
    assert [known for known in tasks.names() if fnmatchcase(known, task)]
    averages = NODES if name == "daso2021" else {}
    for section in recipe.read(name):
        when = section.get("when", {})
        if task in section["tasks"] and "batch_size" not in when and set(when) <= {"workers"}:
            size = 4 * when.get("workers", averages.get("workers", 1))
            rehearse(job(name, task, **{**averages, **when}, steps=2, batch_size=size).resolved())


@pytest.mark.parametrize(
    ("name", "task"), [pytest.param(*pair, marks=pytest.mark.slow) if pair[1] in LARGE else pair for pair in PAIRS]
)
def test_a_recipe_trains_two_steps_on_embedded_data(name, task):
    if task in NEED_TORCHVISION:
        pytest.importorskip("torchvision")
    one = job(name, task, steps=2, batch_size=4, averaging="none")
    if one.optimizer == "lamb":
        pytest.importorskip("pytorch_optimizer")
    run = Training(one.resolved(), ALONE, observer=Silent(), stop=lambda: False)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    assert run.run().status == "finished"
    assert not all(map(torch.equal, before, run.model.parameters()))


def rates(one):
    """Return the learning rate of the first step of each epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=one.learning_rate)
    scheduler = build_scheduler(one, optimizer)
    assert isinstance(scheduler, LRScheduler)
    found = []
    for step in range(one.total_steps):
        if step % one.steps_per_epoch == 0:
            found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_pauloski_has_the_numbers_of_the_paper():
    one = job("pauloski2022", "resnet50-imagenet", workers=16).resolved()
    assert (one.batch_size, one.epochs) == (32 * 16, 55)
    assert one.learning_rate == pytest.approx(0.0125 * 16)
    assert one.task_options == {"label_smoothing": 0.1}
    assert (one.optimizer, one.options, one.damping) == ("sgd", {"momentum": 0.9}, 0.001)
    assert (one.inverses, one.curvature, one.form, one.layers) == (10, "kfac", "eigen", ["Linear", "Conv2d"])
    rate = rates(one)
    assert rate[0] == pytest.approx(0.0125)
    assert rate[5:25] == pytest.approx([0.2] * 20)
    falls = [epoch for epoch in range(6, 55) if rate[epoch] < 0.5 * rate[epoch - 1]]
    assert falls == [25, 35, 40, 45, 50]
    for workers, inverses in ((32, 1000), (64, 500), (128, 250), (256, 125)):
        values = recipe.apply("pauloski2022", {"task": "resnet50-imagenet", "workers": workers})
        assert values["inverses"] == inverses
        assert values["batch_size"] == 32 * workers


def test_zhang_has_the_numbers_of_table_2():
    one = job("zhang2022", "resnet110-cifar10", workers=4).resolved()
    assert one.learning_rate == pytest.approx(0.4)
    assert (one.batch_size, one.epochs, one.damping, one.placement) == (512, 100, 0.03, "dp")
    assert one.curvature_options == {"factor_decay": 0.95}
    rate = rates(one)
    assert [epoch for epoch in range(1, 100) if rate[epoch] < 0.5 * rate[epoch - 1]] == [35, 75, 90]
    answers = job("zhang2022", "bert-squad", workers=8).resolved()
    assert (answers.learning_rate, answers.batch_size, answers.epochs) == (pytest.approx(8 * 5e-6), 32, 3)
    translation = job("zhang2022", "transformer-multi30k", epochs=30, workers=8).resolved()
    assert (translation.optimizer, translation.batch_size) == ("adam", 128)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=translation.learning_rate)
    scheduler = build_scheduler(translation, optimizer)
    assert scheduler.get_last_lr() == pytest.approx([1e-6])
    for _ in range(2000):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([4.5e-6])
    large = recipe.apply("zhang2022", {"task": "resnet50-imagenet", "workers": 64})
    assert (large["batch_size"], large["damping"], large["inverses"], large["factors"]) == (2048, 0.002, 500, 50)


def test_hylo_and_daso_have_the_numbers_of_the_papers():
    hylo = recipe.apply("hylo2022", {"task": "resnet50-imagenet", "workers": 64})
    assert (hylo["batch_size"], hylo["epochs"], hylo["curvature_options"]["rank"]) == (80 * 64, 50, 0.1)
    daso = job("daso2021", "resnet50-imagenet", workers=16, nodes=4).resolved()
    assert (daso.learning_rate, daso.batch_size) == (pytest.approx(0.2), 512)
    assert (daso.epochs, daso.options) == (90, {"momentum": 0.9, "weight_decay": 1e-4})
    assert (daso.schedule, daso.schedule_options["factor"], daso.schedule_options["patience"]) == ("plateau", 0.5, 5)
    assert (daso.averaging_options["batches_between"], daso.averaging_options["batches_to_wait"]) == (4, 1)


def test_bert_has_the_batches_and_steps_of_two_phases():
    def phase(**given):
        values = recipe.apply("pauloski2022", {"task": "bert-pretraining", **given})
        return values["batch_size"], values["steps"], values["factors"], values["inverses"]

    assert phase() == (65536, 5000, 5, 50)
    assert phase(task_options={"phase": 2}) == (32768, 1400, 5, 50)


@pytest.mark.parametrize("row", [recipes.large_batch(size) for size in (4096, 32768, 131072)])
def test_osawa_has_the_epochs_of_table_1(row):
    values = {"batch_size": row.batch_size}
    epochs = [section["epochs"] for section in recipe.read("osawa2019") if section.get("when", values) == values]
    assert epochs[-1] == row.epochs


def test_given_fields_take_the_place_of_the_recipe_and_of_what_belongs_to_it():
    def values(**given):
        return recipe.apply("pauloski2022", {"task": "resnet50-imagenet", **given})

    assert values(options={"nesterov": True})["options"] == {"momentum": 0.9, "nesterov": True}
    other = values(optimizer="adamw", learning_rate=1e-3)
    assert not {"options", "learning_rate_base_size"} & set(other)
    assert "warmup_lr" not in other["schedule_options"]
    assert values(optimizer="SGD")["options"] == {"momentum": 0.9}
    assert "epochs" not in values(steps=7)
    assert values(batch_size=7, workers=2)["batch_size"] == 7
    assert values(local_batch_size=7, workers=2)["batch_size"] == 14
    plain = values(curvature="none")
    assert not {"damping", "layers", "form", "inverses", "kl_clip", "placement"} & set(plain)
    assert plain["schedule"] == "step"


@pytest.mark.parametrize(
    ("name", "task", "own"), [("pauloski2022", "resnet32-cifar10", "sgd"), ("large-batch", "digits", "heavyball")]
)
def test_the_rate_of_a_recipe_is_refused_for_another_optimizer(name, task, own):
    with pytest.raises(ValueError, match=f"must be given with another optimizer than {own}, which the recipe's"):
        recipe.apply(name, {"task": task, "optimizer": "adamw"})
    assert recipe.apply("hylo2022", {"task": "3c1f-fashion-mnist", "optimizer": "adamw"})["optimizer"] == "adamw"


def test_the_warm_up_stays_with_another_schedule_and_is_given_once():
    def values(recipe_name, task, **given):
        found = recipe.apply(recipe_name, {"task": task, **given})
        return found.get("warmup"), found["schedule_options"]

    images = ("pauloski2022", "resnet32-cifar10")
    assert values(*images, schedule="cosine") == (None, {"warmup_epochs": 5, "warmup_lr": 0.1})
    steps, options = values(*images, warmup=7)
    assert steps == 7
    assert options == {"warmup_lr": 0.1, "milestones": [35, 75, 90], "factor": 0.1}
    sentences = ("zhang2022", "transformer-multi30k")
    assert values(*sentences, schedule="step") == (4000, {"warmup_lr": 1e-6})
    assert values(*sentences, schedule_options={"warmup_epochs": 2}) == (None, {"warmup_lr": 1e-6, "warmup_epochs": 2})


@pytest.mark.parametrize("given", [{"batch_size": 32768}, {"local_batch_size": 32, "workers": 1024}])
def test_the_batch_of_all_ranks_decides_which_sections_fit(tmp_path, given):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[recipe]]\ntasks = ["digits"]\nlocal_batch_size = 3\nepochs = 1\n'
        '[[recipe]]\ntasks = ["digits"]\nwhen = {batch_size = 32768}\nepochs = 2\n'
    )
    values = recipe.apply(str(path), {"task": "digits", **given})
    assert (values["batch_size"], values["epochs"]) == (32768, 2)
    assert recipe.apply(str(path), {"task": "digits", "workers": 4}) == {
        **{"task": "digits", "workers": 4, "batch_size": 12, "epochs": 1}
    }


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[recipe]]\ntasks = ["tab*", "digits"]\noptimizer = "sgd"\nlearning_rate = 0.1\n'
        '[[recipe]]\ntasks = ["tabular"]\nwhen = {batch_size = 32, options = {momentum = 0.5}}\nlearning_rate = 0.2\n'
    )
    given = {"task": "tabular", "batch_size": 32}
    assert job(str(path), **given) == Job(**given, optimizer="sgd", learning_rate=0.1)
    momentum = {"options": {"momentum": 0.5}}
    assert job(str(path), **given, **momentum) == Job(**given, **momentum, optimizer="sgd", learning_rate=0.2)
    with pytest.raises(ValueError, match=r"one for text; this one is for tab\*, digits"):
        job(str(path), "text")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("recipe = 3", r"tables \[\[recipe\]\]"),
        ("tasks = [", "in TOML"),
        ('[[recipe]]\ntasks = ["digits"]\nlearningrate = 3', "one without learningrate"),
        ('[[recipe]]\ntasks = ["digits"]\nseed = 3', "one without seed"),
        ('[[recipe]]\ntasks = "digits"', "where tasks is a list"),
        ("[[recipe]]\nepochs = 3", "whose tables have tasks"),
        ('[[recipe]]\ntasks = ["digits"]\noptions = 3', "where options is a table"),
        ('[[recipe]]\ntasks = ["digits"]\nwhen = {worker = 8}', "one where when has no worker"),
        ('[[recipe]]\ntasks = ["digits"]\nrule = "small-batch"', "where rule is one of large-batch"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, named):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=named):
        job(str(path), "digits")


def test_a_recipe_that_does_not_exist_or_fit_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"recipe='pauloski' .* one of none, daso2021"):
        job("pauloski", "digits")
    with pytest.raises(ValueError, match=r"recipe=.*mine.toml"):
        job(str(tmp_path / "mine.toml"), "digits")
    with pytest.raises(ValueError, match=r"recipe='large-batch' .* classes of images"):
        job("large-batch", "tabular")
    with pytest.raises(ValueError, match="local_batch_size=8"):
        job("none", "digits", local_batch_size=8, batch_size=8)
