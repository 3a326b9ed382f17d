"""Vocabularies are the same in every process, and are read from the files that others use."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from natgrad.tasks import DataError, vocabulary

PRINT = """
from pathlib import Path
from natgrad.tasks import vocabulary
texts = Path({path!r}).read_text().splitlines()
for tokenizer in (vocabulary.train_word_pieces(texts, 300), vocabulary.train_byte_pairs(texts, 400, ["<pad>"])):
    print(sorted(tokenizer.get_vocab().items()))
"""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return Path(argparse.__file__).read_text().splitlines()


def test_a_trained_vocabulary_is_the_same_in_every_process(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "text"
    path.write_text("\n".join(texts))
    found = [
        subprocess.run([sys.executable, "-c", PRINT.format(path=str(path))], capture_output=True, check=True).stdout
        for _ in range(3)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 5000


def test_word_pieces_are_berts(texts: list[str]) -> None:
    tokenizer = vocabulary.train_word_pieces(texts, 300)
    assert tokenizer.get_vocab_size() == 300
    assert [tokenizer.id_to_token(index) for index in range(5)] == list(vocabulary.BERT_SPECIAL)
    encoded = tokenizer.encode("The Import\u00e9d [MASK] names", add_special_tokens=False)
    assert encoded.tokens[0] == "the"
    assert "[MASK]" in encoded.tokens
    assert any(token.startswith("##") for token in encoded.tokens)
    assert tokenizer.decode(encoded.ids) == "the imported names"
    assert tokenizer.encode("\u4e2d", add_special_tokens=False).tokens == ["[UNK]"]


def test_byte_pairs_restore_any_text(texts: list[str]) -> None:
    tokenizer = vocabulary.train_byte_pairs(texts, 400, ["<pad>", "<end>"])
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.id_to_token(1) == "<end>"
    line = "Gr\u00fc\u00dfe \u4e2d  import"
    assert tokenizer.decode(tokenizer.encode(line).ids) == line
    assert len(tokenizer.encode("import").ids) < len("import")


def test_both_kinds_of_files_are_read(tmp_path: Path, texts: list[str]) -> None:
    tokenizer = vocabulary.train_word_pieces(texts, 300)
    tokenizer.save(str(tmp_path / "v.json"))
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    tokens.append("a\u2028b")  # which ends a line for `str.splitlines` alone
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    assert vocabulary.read(tmp_path / "vocab.txt", ()).token_to_id(tokens[-1]) == 300
    for name in ("v.json", "vocab.txt"):
        again = vocabulary.read(tmp_path / name, vocabulary.BERT_SPECIAL)
        for line in texts[:20]:
            assert torch.equal(*(torch.tensor(each.encode(line).ids) for each in (again, tokenizer)))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("v.json", "{}", "v.json is no vocabulary, a JSON file of tokenizers or one token a line"),
        ("vocab.txt", "[PAD]\nthe\n", r"vocab.txt lacks the tokens \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
        ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\nthe\n[MASK]\n", r"has 6 different tokens.*not 0 to 5"),
        ("vocab.txt", "[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\n", r"has \[PAD\] as token 3, and must .* token 0"),
        ("vocab.txt", b"\xff\xfe", "vocab.txt is no vocabulary"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, content: str | bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=named):
        vocabulary.read(tmp_path / name, vocabulary.BERT_SPECIAL)
    with pytest.raises(ValueError, match=r"vocabulary=.*nowhere.*existing file"):
        vocabulary.read(tmp_path / "nowhere", vocabulary.BERT_SPECIAL)
