"""Sentences are read and translated, and their loss, metric and factors are those of the tokens without padding."""

import gzip
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor, nn

import natgrad
from natgrad import tasks
from natgrad.errors import NatgradWarning
from natgrad.tasks import DataError, numerals, vocabulary
from natgrad.tasks.transformer import FIRST, LAST, PAD, Transformer
from natgrad.tasks.translation import SPECIAL, Bleu
from tests.dense import reference as dense
from tests.tasks import folders

TINY = {"size": "tiny", "vocabulary_size": 300}


def load(folder: Path, **options: object) -> tuple[tasks.Task, tuple]:
    task = tasks.get("transformer-multi30k", data=str(folder), **TINY, **options)
    return task, task.datasets()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("split", "test"), [("val", "test"), ("test", "test"), ("test", "test_2016_flickr")])
def test_sentences_are_those_of_the_files(tmp_path: Path, zipped: bool, split: str, test: str) -> None:
    folders.multi30k(tmp_path, zipped=zipped, test=test)
    task, (train, held) = load(tmp_path, split=split)
    assert (len(train), len(held)) == (16, 4)
    (sources, before), targets = train[[0, 3]]
    decode = held.tokenizer.decode_batch
    assert decode(sources.tolist()) == [folders.SENTENCES[0][0], folders.SENTENCES[3][0]]
    assert decode(targets.tolist()) == [folders.SENTENCES[0][1], folders.SENTENCES[3][1]]
    for row, shifted in zip(targets, before, strict=True):
        length = int((row != PAD).sum())
        assert row[length - 1] == LAST
        assert shifted[: length + 1].tolist() == [FIRST, *row[: length - 1].tolist(), PAD][: len(shifted)]
        assert (shifted[length:] == PAD).all()
    first = 1 if split == "val" else 2
    sources, references = held[:2]
    assert references == [english for _, english in folders.SENTENCES[first : first + 2]]
    assert decode(sources.tolist()) == [german for german, _ in folders.SENTENCES[first : first + 2]]
    _, (other, _) = load(tmp_path, direction="en-de")
    assert len(other) == 16
    assert task.metric.name == "BLEU"


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def change(name: str, act: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(act((folder / name).read_bytes()))


def copy(name: str, to: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / name, folder / to)


def remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def zip_badly(folder: Path) -> None:
    (folder / "val.de").unlink()
    (folder / "val.de.gz").write_bytes(gzip.compress(b"Ein Hund.\n" * 50)[:-9])


WRONG = [
    (remove("train.en"), r"train.en is missing: Multi30k has one for each language, also as \.gz"),
    (remove_all, r"has no train sentences of Multi30k: expected train\.de and train\.en, also as \.gz"),
    (change("train.en", lambda old: old + b"One more.\n"), r"train.de has 16 lines, and train.en 17"),
    (change("val.de", lambda old: b"\xff" + old), "val.de is damaged, or no text in UTF-8"),
    (zip_badly, "val.de.gz is damaged"),
    (change("val.en", lambda _: b"\n"), "val.en has no sentences"),
    (
        lambda folder: (folder / "train.en").write_bytes((folder / "train.de").read_bytes()),
        "train.en has the same sent",
    ),
    (lambda folder: [copy(f"train.{end}", f"val.{end}")(folder) for end in ("de", "en")], "of val are those of train"),
]


@pytest.mark.parametrize(("damage", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_file_is_named_with_what_was_expected(
    tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    folders.multi30k(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=named) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pairs_with_an_empty_line_are_left_out_and_counted(tmp_path: Path) -> None:
    folders.multi30k(tmp_path)
    lines = (tmp_path / "train.de").read_text().split("\n")
    lines[1] = lines[4] = " "
    (tmp_path / "train.de").write_text("\n".join(lines))
    with pytest.warns(NatgradWarning, match=r"train.de: left out 2 of 16 pairs of sentences, of which one is empty"):
        _, (train, _) = load(tmp_path)
    assert len(train) == 14


def test_a_vocabulary_that_begins_otherwise_is_refused(tmp_path: Path) -> None:
    folders.multi30k(tmp_path)
    path = tmp_path / "vocabulary.json"
    for special, fits in ((SPECIAL, True), (SPECIAL[::-1], False)):
        tokenizer = vocabulary.train_byte_pairs(["Ein Hund"], 270, special)
        tokenizer.save(str(path))
        task = tasks.get("transformer-multi30k", data=str(tmp_path), size="tiny", vocabulary=str(path))
        if fits:
            assert task.load()[1].tokenizer.get_vocab() == tokenizer.get_vocab()
        else:
            with pytest.raises(DataError, match=r"vocabulary.json begins with </s>, <s>, <pad>, and must with <pad>"):
                task.load()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": "large"}, "size='large'.*tiny, base"),
        ({"direction": "en-fr"}, "direction='en-fr'.*de-en, en-de"),
        ({"split": "train"}, "split='train'.*val, test"),
        ({"vocabulary": 3}, "vocabulary=3"),
        ({"vocabulary_size": 0}, "vocabulary_size=0"),
        ({"vocabulary_size": 400, "vocabulary": "v.json"}, "vocabulary_size=400.*left out where vocabulary"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tasks.get("transformer-multi30k", **options)


def test_embedded_sentences_are_numbers_and_dates_in_words() -> None:
    assert numerals.english(502) == "five hundred and two"
    assert numerals.german(502) == "fünfhundertzwei"
    assert numerals.english(245_307) == "two hundred and forty-five thousand three hundred and seven"
    assert numerals.german(245_307) == "zweihundertfünfundvierzigtausenddreihundertsieben"
    assert numerals.english(100_001) == "one hundred thousand and one"
    assert numerals.german(121_001) == "einhunderteinundzwanzigtausendeins"
    days = (1, 12, 20, 23)
    assert " ".join(map(numerals.english_ordinal, days)) == "first twelfth twentieth twenty-third"
    assert " ".join(map(numerals.german_ordinal, days)) == "ersten zwölften zwanzigsten dreiundzwanzigsten"
    pairs = numerals.pairs(2000, seed=0)
    assert numerals.pairs(2000, seed=0) == pairs
    assert len({german for german, _ in pairs}) == 2000
    train, test = tasks.get("transformer-multi30k").datasets()
    assert (len(train), len(test)) == (6000, 100)


# --- Model, loss and metric -----------------------------------------------------------------------------------------


def small(*, layers: int = 1, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(11, width=width, heads=2, inner=12, layers=layers, dropout=0.0).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def batch(lengths: list[tuple[int, int]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return random sources and targets of these lengths."""
    generator = torch.Generator().manual_seed(1)

    def draw(sizes: list[int]) -> Tensor:
        tokens = torch.randint(3, 11, (len(sizes), max(sizes)), generator=generator)
        return tokens.masked_fill(torch.arange(max(sizes)) >= torch.tensor(sizes)[:, None], PAD)

    sources, targets = (draw(list(each)) for each in zip(*lengths, strict=True))
    return (sources, torch.cat((torch.full((len(lengths), 1), FIRST), targets[:, :-1]), 1)), targets


def test_the_base_model_has_the_papers_sizes() -> None:
    task = tasks.get("transformer-multi30k", size="base")
    with torch.device("meta"):
        model = task.model()
    attention, perceptron, norm = 4 * 512 * 513, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    encoder, decoder = attention + perceptron + 2 * norm, 2 * attention + perceptron + 3 * norm
    tokens = 600 * 512  # of the embedded sentences; one table for sources, targets and logits
    assert sum(parameter.numel() for parameter in model.parameters()) == tokens + 2 * (encoder + decoder)


def test_padding_and_later_tokens_change_nothing() -> None:
    model = small(layers=2).eval()
    (sources, before), targets = batch([(5, 6), (3, 2)])
    logits = model((sources, before))
    torch.testing.assert_close(model((sources[1:, :3], before[1:, :2])), logits[1:, :2])
    changed = before.clone()
    changed[0, 4] = 3 if before[0, 4] != 3 else 4
    torch.testing.assert_close(model((sources, changed))[0, :4], logits[0, :4])
    assert not torch.allclose(model((sources, changed))[0, 4:], logits[0, 4:])
    assert targets.shape == before.shape


@torch.no_grad()
def test_a_translation_has_the_most_probable_token_at_each_place() -> None:
    model = small(layers=2).eval()
    (sources, _), _ = batch([(6, 1), (4, 1), (2, 1)])
    found = model(sources)
    assert found.shape[1] <= 6 + 50
    alone = model(sources[2:, :2])
    assert torch.equal(alone[0], found[2, : alone.shape[1]])
    assert not found[2, alone.shape[1] :].any()
    logits = model((sources, torch.cat((torch.full((3, 1), FIRST), found[:, :-1]), 1)))
    for best, row, most in zip(logits.argmax(-1), found, (56, 54, 52), strict=True):
        ends = (row == LAST).nonzero().flatten()
        length = int(ends[0]) + 1 if len(ends) else most
        assert torch.equal(best[:length], row[:length])
        assert (row[length:] == PAD).all()
    model.head.weight.data[LAST] = 100 * logits.new_ones(8)
    model.decoder.layers[-1].norm3.bias.data.fill_(10.0)
    assert model(sources).tolist() == [[LAST]] * 3


def test_the_loss_is_the_mean_over_tokens_with_smoothed_labels() -> None:
    task = tasks.get("transformer-multi30k")
    _, targets = batch([(5, 6), (3, 2)])
    logits = torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(0))
    each = [
        -(0.9 * row.log_softmax(-1)[target] + 0.1 * row.log_softmax(-1).mean())
        for row, target in zip(logits.flatten(0, 1), targets.flatten().tolist(), strict=True)
        if target != PAD
    ]
    assert len(each) == task.count(targets) == 8
    torch.testing.assert_close(task.loss(logits, targets), torch.stack(each).mean())


def test_bleu_of_batches_is_that_of_all_sentences() -> None:
    pairs = numerals.pairs(40, seed=3)
    references = [english for _, english in pairs]
    outputs = [text.replace("hundred and", "hundred") for text in references]
    outputs[5], outputs[6] = outputs[6], outputs[5]
    tokenizer = vocabulary.train_byte_pairs(references, 400, SPECIAL)
    metric = Bleu(tokenizer)
    for part in (slice(0, 7), slice(7, 40)):
        rows = [tokenizer.encode(text).ids for text in outputs[part]]
        width = max(map(len, rows)) + 2
        metric.update(torch.tensor([[*row, LAST] + [PAD] * (width - len(row) - 1) for row in rows]), references[part])
    expected = BLEU().corpus_score(outputs, [references]).score / 100
    assert 0.2 < expected < 0.95
    assert metric.compute().item() == pytest.approx(expected)


# --- Curvature ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[(5, 5), (3, 3)] * 6, [(7, 5), (4, 3)] * 6, [(4, 6), (2, 5)] * 6])
def test_factors_are_those_of_the_tokens_without_padding(lengths: list[tuple[int, int]]) -> None:
    """In the encoder, whose number of tokens is another than the loss's, natgrad estimates it: G has another scale."""
    task, model, damping = tasks.get("transformer-multi30k"), small(width=4), 1e-9
    inputs, targets = batch(lengths)
    count = task.count(targets)
    captures = dense.capture(dense.twin(model), lambda model: task.loss(model(inputs), targets) * count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preconditioner = natgrad.Preconditioner(model, damping=damping, reduction=task.reduction, refresh=1)
        task.loss(model(inputs), targets).backward()
        raw = dense.gradients(model)
        names = [name for name in raw if name.endswith(("linear1", "linear2"))]
        assert len(names) == 4
        raw = {name: raw[name].clone() for name in names}
        preconditioner.step(count)
    for name in names:
        sources, _ = inputs
        mask = (sources if name.startswith("encoder") else targets) != PAD
        A, G = captures[name].positions(mask).factors()
        if name.startswith("encoder"):
            kept, rows, share = int(mask.sum()), sources.numel(), count / targets.numel()
            samples, positions = (count, rows) if rows > targets.numel() else (rows * share, rows * share)
            A, G = A * kept / samples, G * kept / positions
        expected = dense.solve_eigen(raw[name], A, G, damping)
        assert dense.relative_error(dense.gradients(model)[name], expected) < 1e-6, name


def test_all_of_the_model_has_curvature() -> None:
    model = small(layers=2)
    explanation = str(natgrad.Preconditioner(model, reduction="tokens").explain())
    assert "100.0% of the parameters can be" in explanation
