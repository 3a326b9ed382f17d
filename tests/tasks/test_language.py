"""Text becomes the same samples in every run: documents, sentences, pairs, masks and windows."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from natgrad import tasks
from natgrad.tasks import DataError, applications, bert, corpus, gpt, vocabulary
from natgrad.tasks.layouts import text
from tests.tasks import texts

TINY: dict[str, Any] = {"size": "tiny", "vocabulary_size": 300}


def task(name: str, tmp_path: Path, **options: Any) -> Any:
    return tasks.get(name, data=str(tmp_path / "data"), cache=str(tmp_path / "cache"), **{**TINY, **options})


@pytest.fixture
def pretraining(tmp_path: Path) -> list[list[str]]:
    found = texts.documents(30)
    texts.pretraining(tmp_path / "data", found)
    return found


def read_all(files: text.TextFiles) -> list[list[str]]:
    found: list[list[str]] = []
    for line, begins in files:
        if begins:
            found.append([])
        found[-1].append(line)
    return found


def test_documents_of_text_files_end_at_blank_lines(tmp_path: Path, pretraining: list[list[str]]) -> None:
    train, test = text.read("pretraining", tmp_path / "data")
    assert read_all(train) == pretraining == read_all(train)
    assert not test.files
    texts.pretraining(tmp_path / "parts" / "train", pretraining[:5])
    texts.pretraining(tmp_path / "parts" / "test", pretraining[5:])
    assert [read_all(part) for part in text.read("pretraining", tmp_path / "parts")] == [
        pretraining[:5],
        pretraining[5:],
    ]


def test_documents_of_wikitext_begin_at_titles(tmp_path: Path) -> None:
    found = texts.documents(7)
    texts.wikitext(tmp_path, found[:4], found[4:])
    train, valid = text.read("wikitext", tmp_path)
    assert len(read_all(train)) == 4
    assert read_all(valid) == [
        [f" = Article {number} =", f" {' '.join(lines[:4])}", " = = Section = =", f" {' '.join(lines[4:])}"]
        for number, lines in enumerate(found[4:])
    ]
    (tmp_path / "wiki.train.tokens").write_text(" = M = \n one \n = = A = = \n two \n = X = Y = \n three \n")
    assert len(read_all(text.read("wikitext", tmp_path)[0])) == 2
    (tmp_path / "wiki.valid.tokens").rename(tmp_path / "wiki.valid.raw")
    assert len(read_all(text.read("wikitext", tmp_path)[1])) == 3


def test_wrong_files_are_named(tmp_path: Path, pretraining: list[list[str]]) -> None:
    data = tmp_path / "data"
    with pytest.raises(ValueError, match=r"data='.*nowhere'.*an existing folder"):
        tasks.get("gpt-wikitext", data=str(tmp_path / "nowhere")).datasets()
    with pytest.raises(DataError, match=r"wiki.train.tokens is missing: WikiText has"):
        tasks.get("gpt-wikitext", data=str(data)).datasets()
    (data / "part-1.txt").write_bytes(b"one\nt\xff\xfeo\n")
    with pytest.raises(DataError, match=r"part-1.txt is not text in UTF-8"):
        task("bert-pretraining", tmp_path).datasets()
    texts.pretraining(data, pretraining[:3])
    with pytest.raises(DataError, match="has 3 documents, 1 of them for training: at least two"):
        task("bert-pretraining", tmp_path).datasets()
    for path in data.iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"has no text files \(\*.txt\)"):
        task("bert-pretraining", tmp_path).datasets()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("bert-pretraining", {"size": "small"}, "size='small'.*tiny, base, large"),
        ("gpt-wikitext", {"size": "base"}, "size='base'.*tiny, small, medium, large, xl"),
        ("bert-pretraining", {"phase": 3}, "phase=3.*1 or 2"),
        ("gpt-pretraining", {"context": 1025}, "context=1025.*1 to 1024"),
        ("bert-wikitext", {"vocabulary_size": 4}, "vocabulary_size=4"),
        ("bert-wikitext", {"vocabulary": "words.txt", "vocabulary_size": 400}, "vocabulary_size=400.*left out"),
        ("gpt-wikitext", {"cache": ""}, "cache=''.*a path"),
        ("bert-wikitext", {"vocabulary": 3}, "vocabulary=3.*a path"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tasks.get(name, **options)


def test_tokens_are_those_of_the_text_and_are_written_once(
    tmp_path: Path, pretraining: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_SEGMENTS", 7)  # a document ends within a batch
    found = task("bert-pretraining", tmp_path).corpus(word_pieces=True)
    assert found.tokens.dtype == np.uint16
    assert found.tokenizer.get_vocab_size() <= 300  # the text has fewer pieces
    assert found.parts() == (range(28), range(28, 30))
    for number, lines in enumerate(pretraining):
        first, end = found.documents[number : number + 2]
        assert end - first == len(lines)
        for index, line in enumerate(lines, first):
            tokens = found.tokens[found.segments[index] : found.segments[index + 1]]
            assert found.tokenizer.decode(tokens.tolist()).replace(" ", "") == line.lower().replace(" ", "")

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(vocabulary, "train_word_pieces", refuse)
    again = task("bert-pretraining", tmp_path).corpus(word_pieces=True)
    assert np.array_equal(again.tokens, found.tokens)
    assert again.tokenizer.to_str() == found.tokenizer.to_str()
    os.utime(tmp_path / "data" / "part-0.txt", (1, 1))
    for options in ({}, {"vocabulary_size": 310}):
        with pytest.raises(AssertionError):
            task("bert-pretraining", tmp_path, **options).corpus(word_pieces=True)


def test_processes_that_need_the_tokens_at_once_wait_for_one(
    tmp_path: Path, pretraining: list[list[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cached = vocabulary.train_word_pieces

    def slowly(segments: Any, size: int) -> Any:
        sleep(0.5)
        return cached(segments, size=size)

    monkeypatch.setattr(vocabulary, "train_word_pieces", slowly)
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(task("bert-pretraining", tmp_path).corpus, word_pieces=True) for _ in range(3)]
    first, *others = (each.result().tokens for each in loads)
    assert all(np.array_equal(first, tokens) for tokens in others)
    assert capfd.readouterr().err.count("tokenising the text, once, into") == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_lines_are_split_into_sentences_for_bert_alone(tmp_path: Path) -> None:
    texts.wikitext(tmp_path / "data", texts.documents(4), texts.documents(3, seed=1))
    found = task("bert-wikitext", tmp_path).corpus(word_pieces=True)
    assert np.diff(found.documents).tolist() == [14] * 7  # title, heading and twelve sentences
    found = task("gpt-wikitext", tmp_path).corpus(word_pieces=False)
    assert np.diff(found.documents).tolist() == [4] * 7
    assert found.held_out == 4
    end = found.tokenizer.token_to_id("<|endoftext|>")
    starts = found.segments[found.documents[:-1]]
    assert np.flatnonzero(found.tokens == end).tolist() == starts.tolist()
    whole = found.tokenizer.decode(found.tokens.tolist(), skip_special_tokens=False)
    written = [(tmp_path / "data" / f"wiki.{part}.tokens").read_text() for part in ("train", "valid")]
    lines = [line.rstrip() for line in "".join(written).split("\n") if line.strip()]
    assert whole.replace("<|endoftext|>", "").splitlines() == lines


def test_a_vocabulary_in_a_file_is_used(tmp_path: Path, pretraining: list[list[str]]) -> None:
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join([*vocabulary.BERT_SPECIAL, *texts.WORDS, ".", "unused"]))
    given = {"vocabulary": str(words), "vocabulary_size": None}
    train = task("bert-pretraining", tmp_path, **given).datasets()[0]
    assert train.tokenizer.get_vocab_size() == len(texts.WORDS) + 7
    assert vocabulary.UNKNOWN not in train.corpus.tokenizer.decode(train.corpus.tokens.tolist())
    found = task("gpt-pretraining", tmp_path).corpus(word_pieces=False)
    found.tokenizer.save(str(tmp_path / "pairs.json"))
    pairs = {"vocabulary": str(tmp_path / "pairs.json"), "vocabulary_size": None, "context": 16}
    assert task("gpt-pretraining", tmp_path, **pairs).datasets()[0].tokenizer.get_vocab_size() == 300
    with pytest.raises(DataError, match=r"vocab.txt lacks the tokens <\|endoftext\|>"):
        task("gpt-pretraining", tmp_path, **given).datasets()


def pieces(samples: bert.Pairs, inputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the texts of each sample without its masks."""
    tokens = inputs["input_ids"].clone()
    chosen = targets["words"] != bert.IGNORED
    rows = torch.arange(len(tokens))[:, None].expand_as(chosen)
    tokens[rows[chosen], inputs["masked"][chosen]] = targets["words"][chosen]
    found = [[samples.corpus.tokenizer.id_to_token(token) for token in row] for row in tokens.tolist()]
    return [row[: int(seen.sum())] for row, seen in zip(found, inputs["attention_mask"], strict=True)]


def test_pairs_are_a_text_and_its_continuation_or_a_random_one(tmp_path: Path, pretraining: list[list[str]]) -> None:
    train, test = task("bert-pretraining", tmp_path).datasets()
    epoch = train.augmented(3, 1)
    inputs, targets = epoch[:]
    lines = {"".join(line.lower().split()): (d, s) for d, text in enumerate(pretraining) for s, line in enumerate(text)}
    for row, kinds, is_random, (first, end) in zip(
        pieces(epoch, inputs, targets), inputs["token_type_ids"], targets["next"].tolist(), epoch.spans, strict=True
    ):
        middle = row.index("[SEP]")
        assert (row[0], row[-1], row.count("[SEP]")) == ("[CLS]", "[SEP]", 2)
        assert kinds.tolist() == [0] * (middle + 1) + [1] * (len(row) - middle - 1) + [0] * (128 - len(row))
        one, other = (
            "".join(part).replace("##", "").replace(".", ".\n").split()
            for part in (row[1:middle], row[middle + 1 : -1])
        )
        assert lines[one[0]] == (
            document := int(np.searchsorted(epoch.corpus.documents, first, "right")) - 1,
            lines[one[0]][1],
        )
        complete = [lines[line] for line in (*one, *other) if line in lines]
        if is_random:
            assert {at for at, _ in (lines[line] for line in other if line in lines)} <= {*range(28)} - {document}
        else:
            assert len(complete) == end - first
            assert [place for _, place in complete] == [*range(complete[0][1], complete[0][1] + end - first)]
    share = targets["next"].double().mean()
    assert 0.3 < share < 0.7
    assert len(test) > 0
    assert test.documents == range(28, 30)


def test_masks_are_as_in_the_paper_and_drawn_by_seed_epoch_and_sample(tmp_path: Path) -> None:
    texts.pretraining(tmp_path / "data", texts.documents(300))
    train, test = task("bert-pretraining", tmp_path).datasets()
    inputs, targets = train.augmented(1, 0)[:]
    words, chosen = targets["words"], targets["words"] != bert.IGNORED
    assert chosen.sum(1).max() <= 20
    sizes = inputs["attention_mask"].sum(1) - 3
    assert torch.equal(chosen.sum(1), (0.15 * sizes.double()).round().long().clamp(1, 20))
    seen = inputs["input_ids"].gather(1, inputs["masked"])[chosen]
    mask = train.corpus.tokenizer.token_to_id("[MASK]")
    shares = [(seen == mask), (seen == words[chosen]), (seen != mask) & (seen != words[chosen])]
    assert [float(share.double().mean()) for share in shares] == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    special = torch.tensor([train.corpus.tokenizer.token_to_id(name) for name in ("[PAD]", "[CLS]", "[SEP]")])
    assert not torch.isin(words[chosen], special).any()
    assert all(len({*row[row > 0].tolist()}) == int((row > 0).sum()) for row in inputs["masked"])

    some = train.augmented(1, 0)[[5, 2]]
    assert all(torch.equal(some[0][name], inputs[name][[5, 2]]) for name in inputs)
    assert torch.equal(some[1]["words"], words[[5, 2]])
    for other in (train.augmented(1, 1), train.augmented(2, 0)):
        assert not torch.equal(other[:][1]["words"], words)
    assert torch.equal(test[:][1]["words"], test[:][1]["words"])


def test_phase_two_has_longer_samples(tmp_path: Path, pretraining: list[list[str]]) -> None:
    texts.pretraining(tmp_path / "data", texts.documents(8, sentences=80))
    train, _ = task("bert-pretraining", tmp_path, phase=2).datasets()
    inputs, targets = train[:]
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (len(train), 512)
    assert targets["words"].shape == (len(train), 80)
    assert inputs["attention_mask"].sum(1).max() > 480


def test_a_sentence_longer_than_a_sample_is_cut(tmp_path: Path) -> None:
    texts.pretraining(tmp_path / "data", texts.documents(8, sentences=2, words=400))
    train, _ = task("bert-pretraining", tmp_path).datasets()
    inputs, targets = train[:]
    assert torch.equal(inputs["attention_mask"], torch.ones_like(inputs["attention_mask"]))
    assert targets["next"].tolist() == [1] * len(train)


def test_windows_are_the_text_one_after_the_other(tmp_path: Path, pretraining: list[list[str]]) -> None:
    train, test = task("gpt-pretraining", tmp_path, context=16).datasets()
    inputs, targets = train[:]
    assert torch.equal(inputs["input_ids"][:, 1:], targets[:, :-1])
    assert torch.equal(inputs["input_ids"][1:, 0], targets[:-1, -1])
    whole = torch.from_numpy(train.tokens[: 16 * len(train)].astype(np.int64))
    assert torch.equal(inputs["input_ids"].flatten(), whole)
    assert torch.equal(inputs["position_ids"], torch.arange(16).expand(len(train), -1))
    assert len(train) > 10 * len(test) > 0
    with pytest.raises(DataError, match=r"data has \d+ tokens for testing, and a window needs 1001"):
        task("gpt-pretraining", tmp_path, context=1000).datasets()


@pytest.mark.parametrize("name", ["bert-pretraining", "gpt-wikitext"])
def test_a_few_steps_lower_the_loss_and_the_metric_follows(name: str) -> None:
    task = tasks.get(name)
    torch.manual_seed(0)
    model, (train, test) = task.model(), task.datasets()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, values = [], []
    for _ in range(2):
        evaluator = task.evaluator()
        inputs, targets = test[:16]
        with torch.no_grad():
            evaluator.update(model(inputs), targets)
        values.append(float(evaluator.compute()))
        for _ in range(12):
            inputs, targets = train[:8]
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert (values[1] < values[0]) == (task.metric.better == "lower")
    outputs = model(inputs)
    is_gpt = isinstance(targets, torch.Tensor)
    exact = 50.0 * nn.functional.one_hot(
        (targets if is_gpt else targets["words"]).clamp(min=0), train.tokenizer.get_vocab_size()
    )
    evaluator.reset()
    evaluator.update(exact if is_gpt else {**outputs, "words": exact}, targets)
    assert float(evaluator.compute()) == pytest.approx(1)


def test_the_perplexity_is_finite_where_a_probability_is_not_above_zero() -> None:
    metric, outputs, targets = gpt.Perplexity(tasks.get("gpt-wikitext").loss), torch.zeros(1, 4, 10), torch.zeros(1, 4)
    outputs[..., 0] = 120.0
    targets[:, 3] = 1
    metric.update(outputs, targets.long())
    metric.update(torch.zeros(1, 8, 10), torch.arange(8)[None])
    assert metric.compute().item() == pytest.approx(math.exp((120 + 8 * math.log(10)) / 12))


def test_parameters_are_as_many_as_published() -> None:
    """BERT's are those of its encoder, its pooler and both heads; GPT-2's those of its release."""
    with torch.device("meta"):
        counts = {
            (kind.__name__, size): sum(each.numel() for each in build(kind.sizes[size], entries).parameters())
            for kind, build, sizes, entries in (
                (applications.Bert, bert.build, ("base", "large"), 30522),
                (applications.Gpt, gpt.build, ("small", "medium", "large", "xl"), 50257),
            )
            for size in sizes
        }
    assert counts == {
        ("Bert", "base"): 110_106_428,
        ("Bert", "large"): 336_226_108,
        ("Gpt", "small"): 124_439_808,
        ("Gpt", "medium"): 354_823_168,
        ("Gpt", "large"): 774_030_080,
        ("Gpt", "xl"): 1_557_611_200,
    }


def test_the_kept_text_names_its_vocabulary(tmp_path: Path, pretraining: list[list[str]]) -> None:
    task("bert-pretraining", tmp_path).datasets()
    (place,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert json.loads((place / "vocabulary.json").read_text())["model"]["type"] == "WordPiece"
    given = {"vocabulary": str(place / "vocabulary.json"), "vocabulary_size": None}
    samples = [
        task("bert-pretraining", tmp_path, **options).datasets()[0][:3][0]["input_ids"] for options in ({}, given)
    ]
    assert torch.equal(*samples)
