"""`nn.MultiheadAttention` with every option: its four projections, against linear layers that do the same."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import natgrad
from tests.dense import reference as dense
from tests.dense.drawn import DRAWN, total_loss

PARTS = ("query", "key", "value")


class Explicit(nn.Module):
    """The same attention from four linear layers, batch first; its masks are added to the scores."""

    def __init__(self, attn):
        super().__init__()
        size, bias = attn.embed_dim, attn.in_proj_bias is not None
        self.heads, self.zero, self.extra = attn.num_heads, attn.add_zero_attn, (attn.bias_k, attn.bias_v)
        for index, part in enumerate(PARTS):
            rows = slice(index * size, (index + 1) * size)
            packed = attn.in_proj_weight is not None
            whole = attn.in_proj_weight if packed else getattr(attn, f"{part[0]}_proj_weight")
            weight = whole[rows] if packed else whole
            layer = nn.Linear(weight.shape[1], size, bias=bias)
            layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=whole.requires_grad)
            if bias:
                layer.bias = nn.Parameter(
                    attn.in_proj_bias[rows].detach().clone(), requires_grad=attn.in_proj_bias.requires_grad
                )
            setattr(self, part, layer)
        self.output = nn.Linear(size, size, bias=bias)
        for name, parameter in attn.out_proj.named_parameters():
            setattr(self.output, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))

    def forward(self, query, key, value, mask):
        q, k, v = self.query(query), self.key(key), self.value(value)
        for extra in [self.extra] * (self.extra[0] is not None) + [(0, 0)] * self.zero:
            more = torch.zeros_like(k[:, :1])
            k, v = (torch.cat([kept, more + new], 1) for kept, new in zip((k, v), extra, strict=True))
            mask = nn.functional.pad(mask, (0, 1))
        q, k, v = (rows.unflatten(2, (self.heads, -1)).transpose(1, 2) for rows in (q, k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + mask
        return self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Attending(nn.Module):
    """An attention layer in a model whose inputs are batch first whatever the layer's are."""

    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, query, key, value, options):
        turn = query.ndim == 3 and not self.attn.batch_first
        turned = {id(one): one.transpose(0, 1) if turn else one for one in (query, key, value)}
        output, _ = self.attn(*(turned[id(one)] for one in (query, key, value)), **options)
        return output.transpose(0, 1) if turn else output


def matrices(attn, values):
    """The trained values of each projection as [1, o, i], from a function of the parameter's name."""
    size, result = attn.embed_dim, {}
    for index, part in enumerate((*PARTS, "output")):
        rows, columns = slice(index * size, (index + 1) * size), []
        weight = "in_proj_weight" if attn.in_proj_weight is not None else f"{part[0]}_proj_weight"
        names = ("out_proj.weight", "out_proj.bias") if part == "output" else (weight, "in_proj_bias")
        for name in names:
            parameter = dict(attn.named_parameters()).get(name)
            if parameter is not None and parameter.requires_grad:
                own = values(parameter)[rows] if name.startswith("in_proj") else values(parameter)
                columns.append(own.reshape(size, -1))
        if columns:
            result[part] = torch.cat(columns, 1)[None].clone()
    return result


@st.composite
def attentions(draw):
    kind = draw(st.sampled_from(["self", "self", "memory", "different", "sizes"]))
    batched, samples = draw(st.booleans()), draw(st.integers(1, 3))
    length, source, heads = draw(st.integers(1, 4)), draw(st.integers(2, 4)), draw(st.integers(1, 2))
    source = length if kind == "self" else source
    attn = nn.MultiheadAttention(
        4, heads, bias=draw(st.booleans()), add_bias_kv=draw(st.booleans()), add_zero_attn=draw(st.booleans()),
        kdim=3 if kind == "sizes" else None, vdim=5 if kind == "sizes" else None, batch_first=draw(st.booleans()),
    ).double()  # fmt: skip
    trained = [name for name, parameter in attn.named_parameters() if "bias_" not in name]
    for name in draw(st.sampled_from([[], [], [], *([name] for name in trained)])):
        attn.get_parameter(name).requires_grad_(False)
    torch.manual_seed(draw(st.integers(0, 99)))
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.7)
    lead = (samples,) if batched else ()
    query = torch.randn(*lead, length, 4).double()
    key, value = query, query
    if kind != "self":
        key = torch.randn(*lead, source, attn.kdim).double()
        value = key if kind == "memory" else torch.randn(*lead, source, attn.vdim).double()
    options = {"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())}
    rows = samples if batched else 1
    added = torch.zeros(rows, 1, length, source).double()
    mask = draw(st.sampled_from([None, "bool", "float", "heads", "causal"]))
    if mask == "bool":
        options["attn_mask"] = (torch.rand(length, source) < 0.4).index_fill(1, torch.tensor([0]), value=False)
    elif mask == "float":
        options["attn_mask"] = torch.randn(length, source).double()
    elif mask == "heads":
        options["attn_mask"] = torch.randn(rows * heads, length, source).double()
    elif mask == "causal":
        options |= {"attn_mask": torch.ones(length, source).triu(1).bool(), "is_causal": True}
    if mask is not None:
        chosen = options["attn_mask"]
        chosen = (
            torch.zeros(chosen.shape).double().masked_fill(chosen, -math.inf) if chosen.dtype == torch.bool else chosen
        )
        added = added + (chosen.view(rows, heads, length, source) if mask == "heads" else chosen)
    if draw(st.booleans()):
        padding = torch.rand(*lead, source) < 0.4
        padding[..., 0] = False
        options["key_padding_mask"] = (
            padding
            if mask in (None, "bool", "causal")
            else (torch.zeros(padding.shape).double().masked_fill(padding, -math.inf))
        )
        added = added.masked_fill(padding.view(rows, 1, 1, source), -math.inf)
    return attn, (query, key, value), options, added


@DRAWN
@given(attentions(), st.sampled_from(["expand", "reduce"]))
def test_attention(drawn, sharing):
    attn, inputs, options, added = drawn
    reference, plain, model = Explicit(attn), copy.deepcopy(attn), Attending(attn)
    samples = len(inputs[0]) if inputs[0].ndim == 3 else 1
    expected = Attending(plain)(*inputs, options)
    (total_loss(expected, samples) / samples).backward()

    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing), damping=0.3)
    outputs = model(*inputs, options)
    assert torch.equal(outputs, expected)
    (total_loss(outputs, samples) / samples).backward()
    for left, right in zip(attn.parameters(), plain.parameters(), strict=True):
        assert left.grad is right.grad or torch.equal(left.grad, right.grad)
    raw = matrices(attn, lambda parameter: parameter.grad)
    preconditioner.step()

    batch_first = [x if x.ndim == 3 else x[None] for x in inputs]
    rows = dense.capture(reference, lambda model: total_loss(model(*batch_first, added), samples))
    solved = matrices(attn, lambda parameter: parameter.grad)
    assert solved.keys() == rows.keys()
    for name, V in dense.KFAC(damping=0.3, sharing=sharing).step(rows, raw).items():
        torch.testing.assert_close(solved[name], V, rtol=1e-8, atol=1e-11)
    for name in ("bias_k", "bias_v"):
        if getattr(attn, name) is not None:
            assert torch.equal(getattr(attn, name).grad, getattr(plain, name).grad)


def packed(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(4, 2, batch_first=True, **options).double()


@pytest.mark.parametrize("reduction", ["mean", "tokens"])
def test_sampled_labels_as_with_linear_layers(reduction):
    attn, x = packed(), torch.randn(3, 5, 4).double()
    models, y = {"attention": attn, "linear": Explicit(attn)}, torch.randint(4, (3, 5))
    for name, model in models.items():
        curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical")
        preconditioner = natgrad.Preconditioner(model, curvature, reduction=reduction, damping=0.3)
        outputs = model(x, x, x)[0] if name == "attention" else model(x, x, x, torch.zeros(5, 5))
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum")
        preconditioner.backward(loss / (3 if reduction == "mean" else 15), outputs)
        preconditioner.step()
    expected = dense.gradients(models["linear"])
    dense.assert_equal(matrices(attn, lambda parameter: parameter.grad), expected)


@pytest.mark.cpu
def test_evaluation_keeps_the_fast_path(monkeypatch):
    attn, x, calls = packed(), torch.randn(3, 5, 4).double(), []
    native = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: calls.append(1) or native(*args))
    natgrad.Preconditioner(attn)
    attn.eval()
    with torch.no_grad():
        attn(x, x, x)
    assert calls
