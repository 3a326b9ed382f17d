"""Texts are cut into windows, and the answer, the loss, the metric and the factors are those of the definition."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from natgrad import tasks
from natgrad.errors import NatgradWarning
from natgrad.tasks import DataError, applications, documentation, vocabulary
from natgrad.tasks.applications.language import TransformerSize
from natgrad.tasks.bert import configuration
from natgrad.tasks.layouts.squad import Question
from natgrad.tasks.questionanswering import Answers, Model, best, cut
from natgrad.training import checkpoint
from natgrad.training.job import Job
from natgrad.training.run import Output, train
from natgrad.training.start import load_weights
from tests.dense import reference as dense
from tests.tasks import folders

OPTIONS = {"size": "tiny", "vocabulary_size": 300}


def load(folder: Path, **options: object) -> tuple[tasks.Task, tuple]:
    task = tasks.get("bert-squad", data=str(folder), **{**OPTIONS, **options})
    return task, task.load()


# --- Files ----------------------------------------------------------------------------------------------------------


def test_questions_are_those_of_the_files(tmp_path: Path) -> None:
    folders.squad(tmp_path)
    _, (train, test) = load(tmp_path)
    assert (len(train), len(test)) == (16, 4)
    assert [question.text for question in test.questions] == [text for text, _ in folders.ANSWERS]
    assert [question.answers for question in test.questions] == [answers for _, answers in folders.ANSWERS]
    assert (train.answers[:, 0] > 0).all()  # a window of 384 tokens holds each text
    for index, (first, last) in enumerate(train.answers.tolist()):
        window, number = train.windows[index], index % 4
        start, end = window.places[first - window.first, 0], window.places[last - window.first, 1]
        context = f"{'A sentence before it. ' * (index // 4)}{folders.CONTEXT}"
        assert context[start:end] == folders.ANSWERS[number][1][0]


def edit(name: str, act: Callable[[Any], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        act(content)
        (folder / name).write_text(json.dumps(content))

    return change


def first_question(content: Any) -> Any:
    return content["data"][0]["paragraphs"][0]["qas"][0]


def move_all(content: Any) -> None:
    for paragraph in content["data"][0]["paragraphs"]:
        for answer in paragraph["qas"][0]["answers"]:
            answer["answer_start"] += 1


TRAIN, DEV = "train-v1.1.json", "dev-v1.1.json"
WRONG = [
    (lambda folder: (folder / DEV).unlink(), "dev-v1.1.json is missing: SQuAD 1.1 has train-v1.1.json and dev"),
    (
        lambda folder: os.rename(folder / DEV, folder / "dev-v2.0.json"),
        r"dev.* missing.*, and the folder dev-v2\.0\.json",
    ),
    (lambda folder: os.truncate(folder / TRAIN, 500), "train-v1.1.json is damaged, no JSON"),
    (lambda folder: (folder / TRAIN).write_bytes(b"\xff\xfe{"), "train-v1.1.json is damaged, no JSON"),
    (lambda folder: (folder / DEV).write_bytes((folder / TRAIN).read_bytes()), "dev.* has the same questions as train"),
    (edit(TRAIN, lambda content: content.update(version="v2.0")), "train.* version 'v2.0', and SQuAD 1.1 has '1.1'"),
    (edit(TRAIN, lambda content: content.pop("data")), "data is not as in SQuAD 1.1: KeyError: 'data'"),
    (edit(TRAIN, lambda content: first_question(content).pop("answers")), "question train0 is not as in .*'answers'"),
    (
        edit(TRAIN, lambda content: first_question(content).update(question=3)),
        "question train0 has texts that are no",
    ),
    (edit(TRAIN, move_all), "train-v1.1.json has nothing but questions, whose answers are not at their places"),
]


@pytest.mark.parametrize(("damage", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_file_is_named_with_what_was_expected(
    tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    folders.squad(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=named) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_answers_that_are_not_in_their_text_are_left_out_and_counted(tmp_path: Path) -> None:
    folders.squad(tmp_path)
    edit(TRAIN, lambda content: first_question(content)["answers"][0].update(text="the Alps"))(tmp_path)
    edit(DEV, lambda content: first_question(content)["answers"][0].update(answer_start=3))(tmp_path)
    with pytest.warns(
        NatgradWarning, match=r"train-v1.1.json: left out 1 of 16 questions, whose answers are not"
    ) as seen:
        _, (train, test) = load(tmp_path)
    assert len(seen) == 1
    assert len(train) == 15
    assert len(test) == 4
    assert test.questions[0].answers == ("Giant Mountains",)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": "small"}, "size='small'.*tiny, base, large"),
        ({"window": 15}, "window=15.*from 16 to 512"),
        ({"window": 384.0}, "window=384.0"),
        ({"window": 100, "stride": 51}, "stride=51.*from 0 to 50"),
        ({"measure": "F1"}, "measure='F1'.*f1, exact-match"),
        ({"vocabulary": ""}, "vocabulary=''"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tasks.get("bert-squad", **options)


# --- Windows --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> list[Question]:
    train, _ = documentation.questions()
    return train[:600]


@pytest.mark.parametrize(("window", "stride"), [(96, 32), (32, 16), (64, 0), (512, 128)])
def test_windows_cover_the_text_and_share_the_stride(embedded: list[Question], window: int, stride: int) -> None:
    tokenizer = vocabulary.train_word_pieces([question.context for question in embedded], 500)
    several = answered = 0
    for question, windows in zip(embedded, cut(embedded, tokenizer, window=window, stride=stride), strict=True):
        text = tokenizer.encode(question.context)
        asked = tokenizer.encode(question.text).ids[: min(64, window // 4)]
        seen: list[int] = []
        for each in windows:
            assert len(each.tokens) <= window
            frame = [2, *asked, 3]
            assert each.tokens[: each.first].tolist() == frame
            assert each.tokens[-1] == 3
            part = each.tokens[each.first : -1].tolist()
            assert seen == [] or seen[len(seen) - stride :] == part[:stride]
            seen += part[stride if seen else 0 :]
            first, last = each.find(question.start, question.start + len(question.answers[0]))
            if first:
                answered += 1
                start, end = each.places[first - each.first, 0], each.places[last - each.first, 1]
                assert start <= question.start
                assert question.start + len(question.answers[0]) <= end
                # No token more: the outer ones have a part of the answer.
                assert each.places[first - each.first, 1] > question.start
                assert each.places[last - each.first, 0] < question.start + len(question.answers[0])
        assert seen == text.ids
        several += len(windows) > 1
    assert answered > 300
    assert (several > 100) == (window < 512)


def test_embedded_questions_have_their_answers_in_the_text() -> None:
    train, test = documentation.questions()
    assert len(train) > 2000
    assert len(test) > 200
    assert not {question.context for question in train} & {question.context for question in test}
    for question in (*train, *test):
        assert question.context.startswith(question.answers[0], question.start)


# --- Metric ---------------------------------------------------------------------------------------------------------


def test_the_best_answer_has_the_largest_sum_of_logits_over_all_windows() -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.full((3, 40, 2), -1)
    for window, (first, end) in enumerate(((4, 39), (4, 30), (2, 5))):
        starts = torch.arange(first, end) * 10 + 1000 * window
        places[window, first:end] = torch.stack((starts, starts + 9), 1)
    for _ in range(20):
        logits = torch.randn(3, 40, 2, generator=generator)
        score, expected = max(
            (float(logits[w, i, 0] + logits[w, j, 1]), (int(places[w, i, 0]), int(places[w, j, 1])))
            for w in range(3)
            for i in range(40)
            for j in range(i, min(i + 30, 40))
            if places[w, i, 0] >= 0 and places[w, j, 0] >= 0
        )
        assert best(logits, places) == expected, score


@pytest.mark.parametrize(("measure", "expected"), [("f1", (1 + 2 * 0.5 * 1 / 1.5) / 3), ("exact-match", 1 / 3)])
def test_the_metric_is_that_of_squad(measure: str, expected: float) -> None:
    """Case, articles and punctuation do not count; the best of all accepted answers does."""
    context = "The Elbe, a river, is long"
    places = torch.tensor([[[-1, -1], [0, 3], [4, 8], [10, 11], [12, 17], [19, 21], [22, 26], [-1, -1]]])

    def logits(first: int, last: int) -> Tensor:
        found = torch.zeros(1, 8, 2)
        found[0, first, 0] = found[0, last, 1] = 9.0
        return found

    def target(*answers: str) -> dict[str, Any]:
        return {"context": context, "answers": answers, "places": places}

    metric = Answers(measure)
    metric.update(torch.cat([logits(1, 2), logits(2, 4)]), [target("Rhine", "elbe!"), target("river")])
    metric.update(logits(6, 6), [target("Hamburg")])
    assert metric.compute().item() == pytest.approx(expected)


def test_a_long_text_is_answered_from_any_of_its_windows(tmp_path: Path) -> None:
    folders.squad(tmp_path)
    task, (_, test) = load(tmp_path, window=32, stride=8, measure="exact-match")
    inputs, targets = test[:]
    assert min(len(target["places"]) for target in targets) > 1
    assert [target["answers"] for target in targets] == [question.answers for question in test.questions]
    logits, place = torch.zeros(*inputs["input_ids"].shape, 2), 0
    for question, found in zip(test.questions, test.windows, strict=True):
        spans = [each.find(question.start, question.start + len(question.answers[0])) for each in found]
        number, (first, last) = next((number, span) for number, span in enumerate(spans) if span[0])
        logits[place + number, first, 0] = logits[place + number, last, 1] = 5.0
        place += len(found)
    evaluator = task.evaluator()
    evaluator.update(logits, targets)
    assert evaluator.compute().item() == 1.0


# --- Model and loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "parameters"), [("base", 108_893_186), ("large", 334_094_338)])
def test_parameters_are_the_published_ones(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Model(configuration(applications.Bert.sizes[size], 30522))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def small() -> nn.Module:
    torch.manual_seed(0)
    model = Model(configuration(TransformerSize(layers=2, width=6, heads=2), 300)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def batch(folder: Path, indices: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    folders.squad(folder)
    _, (train, _) = load(folder)
    return train[indices]


def test_padding_changes_neither_logits_nor_loss(tmp_path: Path) -> None:
    task, model = tasks.get("bert-squad"), small()
    inputs, targets = batch(tmp_path, [0, 13, 3])
    logits = model(inputs)
    lengths = inputs["attention_mask"].sum(1)
    assert lengths[0] < lengths[1]
    alone, answers = batch(tmp_path, [0])
    torch.testing.assert_close(model(alone), logits[:1, : lengths[0]])
    assert torch.equal(answers, targets[:1])
    assert (logits[0, lengths[0] :] == -torch.inf).all()
    losses = [
        0.5 * sum(functional.cross_entropy(logits[row, : lengths[row], side], targets[row, side]) for side in (0, 1))
        for row in range(3)
    ]
    torch.testing.assert_close(task.loss(logits, targets), torch.stack(losses).mean())


def test_factors_are_those_of_the_definition(tmp_path: Path) -> None:
    """Samples are averaged; all positions of a sample have rows, also those of padding, whose gradients are zero."""
    task, model, damping = tasks.get("bert-squad"), small(), 1e-6
    inputs, targets = batch(tmp_path, [0, 13, 3, 6, 9, 10])
    captures = dense.capture(dense.twin(model), lambda model: task.loss(model(inputs), targets) * len(targets))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preconditioner = natgrad.Preconditioner(model, damping=damping, reduction=task.reduction, refresh=1)
        task.loss(model(inputs), targets).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items() if not name.endswith("LayerNorm")}
        preconditioner.step(task.count(targets))
    assert len(raw) == 2 * 6 + 1
    padding = inputs["attention_mask"] == 0
    assert padding.any()
    for name, W in raw.items():
        rows = captures[name]
        assert not rows.g[0, padding].any()
        expected = dense.solve_eigen(W, *rows.factors(), damping)
        assert dense.relative_error(dense.gradients(model)[name], expected) < 1e-6, name
    assert "100.0% of the parameters can be" in str(preconditioner.explain())


def test_a_run_starts_with_the_encoder_of_a_pretraining_and_a_new_head(tmp_path: Path) -> None:
    folders.squad(tmp_path / "data")
    lines = [folders.CONTEXT, *(question for question, _ in folders.ANSWERS)]
    vocabulary.train_word_pieces(lines, 200).save(str(tmp_path / "words.json"))
    job = Job(
        task="bert-pretraining",
        task_options={"vocabulary": str(tmp_path / "words.json")},
        optimizer="sgd",
        steps=1,
        batch_size=2,
    )
    train(job, Output(folder=tmp_path / "run"))
    pretrained = checkpoint.load(checkpoint.latest(tmp_path / "run" / "checkpoints"))["model"]
    task = tasks.get("bert-squad", data=str(tmp_path / "data"), size="tiny", vocabulary=str(tmp_path / "words.json"))
    torch.manual_seed(3)
    model = task.model()
    head = model.qa_outputs.weight.clone()
    load_weights(model, str(tmp_path / "run"), task.new_parameters, task.vocabulary_digest())
    for name, value in model.state_dict().items():
        assert torch.equal(value, head if name == "qa_outputs.weight" else pretrained.get(name, torch.zeros(2))), name
