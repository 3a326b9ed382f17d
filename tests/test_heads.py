"""The layers nearest to the loss, which `natgrad.NaturalMuon` leaves to AdamW, in small models of the usual kinds."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import natgrad


class ResNet(nn.Module):
    """A residual block, and a head that is registered last or first."""

    def __init__(self, first=False):
        super().__init__()
        if first:
            self.fc = nn.Linear(4, 3)
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        if not first:
            self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        y = F.relu_(self.bn1(self.conv1(x)))
        return self.fc(F.relu(x + self.bn2(self.conv2(y))).mean((2, 3)))


class Bert(nn.Module):
    """A masked language model with a tied head, and a prediction from the pooled first position."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.randn(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.pooler = nn.Linear(4, 4)
        self.transform, self.decoder = nn.Linear(4, 4), nn.Linear(4, 7)
        self.decoder.weight = self.embedding.weight
        self.seq_relationship = nn.Linear(4, 2)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        x = x + self.attention(x, x, x, need_weights=False)[0]
        scores = self.decoder(self.transform(x).relu())
        return {"scores": scores, "next": self.seq_relationship(self.pooler(x[:, 0]).tanh())}


class Decoder(nn.Module):
    """A language model with a head that is tied, untied, or the embedding in a function."""

    def __init__(self, kind, way=None):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        if kind == "tied":
            self.head = nn.Linear(4, 7, bias=False)  # before the body
            self.head.weight = self.embedding.weight
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        if kind == "untied":
            self.head = nn.Linear(4, 7, bias=False)
        self.way = way

    def body(self, x):
        x = x + self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.body(x) if self.way is None else self.way(self.body, x)
        return F.linear(x, self.embedding.weight) if not hasattr(self, "head") else self.head(x)


class Trunk(nn.Module):
    """Three tasks with heads of one layer, or of two."""

    def __init__(self, deep=False):
        super().__init__()
        self.trunk = nn.Linear(3, 6)
        heads = [nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, size)) for size in (1, 2, 4)]
        self.heads = nn.ModuleDict({name: each if deep else each[2] for name, each in zip("abc", heads, strict=True)})

    def forward(self, x):
        y = self.trunk(x).tanh()
        return tuple(head(y) for head in self.heads.values())


class Seq2Seq(nn.Module):
    """An encoder and a decoder, with a generator that is registered before both, or last."""

    def __init__(self, first):
        super().__init__()
        parts = {"generator": nn.Linear(4, 6)}
        body = {"encoder": nn.Linear(4, 4), "cross": nn.MultiheadAttention(4, 2), "decoder": nn.Linear(4, 4)}
        parts = {**parts, **body} if first else {**body, **parts}
        for name, module in parts.items():
            self.add_module(name, module)

    def decode(self, x, memory):
        return self.generator(self.decoder(self.cross(x, memory, memory)[0]).tanh())

    def forward(self, x):
        return self.decode(x, self.encoder(x).tanh())


class Cosine(nn.Linear):
    """A head that no layer type covers."""

    def forward(self, x):
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


class HiddenStates(Seq2Seq):
    """Returns the encoder's output too, as transformers' T5."""

    def forward(self, x):
        memory = self.encoder(x).tanh()
        logits = self.decode(x, memory)
        return {"loss": logits.square().mean(), "logits": logits, "memory": memory}


def images():
    return torch.randn(4, 2, 6, 6)


def tokens():
    return torch.randint(7, (3, 5))


def rows():
    return torch.randn(5, 3)


def total(outputs):
    if isinstance(outputs, torch.Tensor):
        return outputs.square().mean()
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return sum(map(total, values))


BERT = ["decoder", "seq_relationship"]
RIGHT = {
    "ResNet": (ResNet, images, ["fc"]),
    "GPT, tied": (partial(Decoder, "tied"), tokens, ["head"]),
    "GPT, untied": (partial(Decoder, "untied"), tokens, ["head"]),
    "encoder and decoder": (partial(Seq2Seq, first=False), lambda: torch.randn(5, 2, 4), ["generator"]),
    "hidden states": (partial(HiddenStates, first=False), lambda: torch.randn(5, 2, 4), ["generator"]),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)),
        rows,
        ["4"],
    ),
    "not covered": (
        lambda: nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), Cosine(20, 1)),
        rows,
        ["4"],
    ),
}
WRONG = {
    "BERT": (Bert, tokens, BERT),
    "several tasks": (Trunk, rows, ["heads.a", "heads.b", "heads.c"]),
    "ResNet, head first": (partial(ResNet, first=True), images, ["fc"]),
    "generator first": (partial(Seq2Seq, first=True), lambda: torch.randn(5, 2, 4), ["generator"]),
}


def build(make, **options):
    torch.manual_seed(0)
    model = make()
    return model, natgrad.NaturalMuon(model, **options)


def step(model, optimizer, inputs):
    optimizer.zero_grad()
    total(model(inputs())).backward()
    optimizer.step()


def left(model, optimizer):
    """Return the names of the modules with a matrix that AdamW moves, except embeddings that are not tied."""
    others = {id(parameter) for parameter in optimizer.param_groups[1]["params"]}
    kinds = nn.Linear, nn.Conv2d, nn.MultiheadAttention
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and any(p.ndim > 1 and id(p) in others for p in module.parameters(recurse=False))
    ]


@pytest.mark.parametrize(("make", "inputs", "heads"), RIGHT.values(), ids=RIGHT)
def test_heads_are_found_when_the_optimizer_is_built(make, inputs, heads):
    """A warning would be an error."""
    model, optimizer = build(make)
    assert left(model, optimizer) == heads
    for _ in range(2):
        step(model, optimizer, inputs)


@pytest.mark.parametrize(("make", "inputs", "heads"), WRONG.values(), ids=WRONG)
def test_other_heads_are_named_once_in_the_first_pass(make, inputs, heads):
    model, optimizer = build(make)
    with pytest.warns(natgrad.NatgradWarning) as caught:
        step(model, optimizer, inputs)
    (warning,) = caught
    assert f": pass heads={heads}. See " in str(warning.message)
    reasons = {row.reason for row in optimizer.explain().rows}
    assert "taken for the head: see heads=" in reasons
    assert "nearest to the loss: head='adamw'" not in reasons
    step(model, optimizer, inputs)
    model, optimizer = build(make, heads=heads)
    assert left(model, optimizer) == heads
    step(model, optimizer, inputs)


def compiled(body, x):
    return torch.compile(body, backend="aot_eager")(x)


@pytest.mark.filterwarnings("error::natgrad.NatgradWarning")
@pytest.mark.parametrize("options", [{"head": "spectral"}, {"heads": ["stem"]}])
def test_what_the_user_chose_is_not_checked(options):
    model, optimizer = build(partial(ResNet, first=True), **options)
    step(model, optimizer, images)
