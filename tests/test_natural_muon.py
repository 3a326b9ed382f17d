"""`natgrad.NaturalMuon`: one optimizer for a whole model."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook

import natgrad


class Network(nn.Module):
    """An embedding, a norm, attention, a convolution, a bias on its own, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution = nn.Conv1d(8, 6, 3, groups=2)
        self.shift = nn.Parameter(torch.zeros(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        y = self.norm(self.table(x))
        y = y + self.attention(y, y, y, need_weights=False)[0]
        return self.head((self.convolution(y.mT).mean(-1) + self.shift).tanh())


MATRICES = {"attention.in_proj_weight", "attention.out_proj.weight", "convolution.weight", "head.weight"}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(11, (16, 5), generator=generator)
    return x, (x < 4).sum(1).clamp(max=3)


def train(model, optimizer, first, last):
    for step in range(first, last):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def moved(model, optimizer, step=0):
    """Return by how much one step moves each parameter."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, optimizer, step, step + 1)
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def names(model, group):
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    return {by_identity[id(parameter)] for parameter in group["params"]}


def test_matrices_move_by_the_update_and_all_else_by_adamw():
    model = Network()
    optimizer = natgrad.NaturalMuon(model, lr=0.02, head="spectral")
    matrices, others = optimizer.param_groups
    assert names(model, matrices) == MATRICES
    assert names(model, others) == {name for name, _ in model.named_parameters()} - MATRICES
    reference = copy.deepcopy(model)
    adamw = torch.optim.AdamW(reference.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0)
    found, expected = moved(model, optimizer), moved(reference, adamw)
    for name in names(model, others):
        torch.testing.assert_close(found[name], expected[name])
    for name in MATRICES - {"convolution.weight", "attention.in_proj_weight"}:
        rms = found[name].square().mean().sqrt().item()
        assert rms == pytest.approx(0.2 * 0.02, rel=1e-4)


def test_all_else_moves_by_adamw_with_nesterov_momentum():
    model = Network().double()
    optimizer = natgrad.NaturalMuon(model, lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    value, moment, square = model.head.weight.detach().clone(), 0, 0
    for step in range(1, 6):
        train(model, optimizer, step - 1, step)
        gradient = model.head.weight.grad
        moment = 0.8 * moment + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        ahead = 0.8 * moment + 0.2 * gradient if step > 1 else moment
        root = (square / (1 - 0.9**step)).sqrt() + 1e-3
        value = (1 - 0.02 * 0.1) * value - 0.02 * ahead / (1 - 0.8**step) / root
        torch.testing.assert_close(model.head.weight, value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(optimizer.state[model.head.weight]["exp_avg"], moment, rtol=1e-9, atol=1e-15)


def test_a_step_that_an_accelerator_skips_leaves_weights_and_moments():
    model = Network()
    optimizer = natgrad.NaturalMuon(model)
    train(model, optimizer, 0, 3)
    update = optimizer.optimizer
    before = copy.deepcopy([list(model.parameters()), update.state_dict()["state"]])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf) if parameter.ndim == 1 else torch.zeros_like(parameter)
    update.found_inf = torch.ones(())
    update._step_others()
    torch.testing.assert_close([list(model.parameters()), update.state_dict()["state"]], before, rtol=0, atol=0)


def test_hooks_of_all_optimizers_run_once_a_step():
    natgrad.create_optimizer(Network(), "sgd+kfac", lr=0.1)  # torch then hooks the step of the base class
    model, seen = Network(), []
    optimizer = natgrad.NaturalMuon(model)
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(type(optimizer)))
    try:
        train(model, optimizer, 0, 2)
    finally:
        handle.remove()
    assert seen == [natgrad.NaturalMuon] * 2


def test_it_learns():
    model = Network()
    first = cross_entropy(model(batch(0)[0]), batch(0)[1]).item()
    assert train(model, natgrad.NaturalMuon(model, lr=0.05), 0, 60) < first / 3


def test_weight_decay_is_decoupled():
    plain, decayed = Network(), Network()
    first, second = natgrad.NaturalMuon(plain, lr=0.1), natgrad.NaturalMuon(decayed, lr=0.1, weight_decay=0.5)
    start = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    one, two = moved(plain, first), moved(decayed, second)
    for name, step in one.items():
        torch.testing.assert_close(two[name], step - 0.05 * start[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", [None, "adamw", natgrad.Spectral(power=0.5, steps=0)])
def test_adamw_moves_the_last_layer_by_default(head):
    model = Network()
    optimizer = natgrad.NaturalMuon(model) if head is None else natgrad.NaturalMuon(model, head=head)
    explanation = optimizer.preconditioner.explain()
    assert "no optimizer" not in str(explanation), "the KL clip is off because the update has a fixed size"
    plan = {row.parameter: row for row in explanation.rows}
    moved_by_adamw = head in (None, "adamw")
    assert ("head.weight" in names(model, optimizer.param_groups[0])) != moved_by_adamw
    if not moved_by_adamw:
        assert plan["head.weight"].curvature.startswith(repr(head))
        assert plan["convolution.weight"].curvature.startswith("Spectral(power=0.25")


def test_refreshes_double_their_distance_up_to_the_interval_and_layers_take_turns():
    model = Network()
    optimizer = natgrad.NaturalMuon(model, interval=6, head="spectral")
    refreshed, before = {}, {}
    for step in range(26):
        train(model, optimizer, step, step + 1)
        for name, block in optimizer.preconditioner.state_dict()["blocks"].items():
            if name not in before or not torch.equal(block["root_G"], before[name]):
                refreshed.setdefault(name, []).append(step)
            before[name] = block["root_G"].clone()
    assert len(refreshed) == 6  # attention's queries, keys and values count apart
    for steps in refreshed.values():
        spans = zip((0, 1, 2, 4, 8, 14, 20), (1, 2, 4, 8, 14, 20, 26), strict=True)
        assert all(first <= step < after for step, (first, after) in zip(steps, spans, strict=True))
    assert len({steps[-1] for steps in refreshed.values()}) > 2


@pytest.mark.parametrize("head", ["spectral", natgrad.Spectral(steps=0)])
def test_gradients_may_vanish(head):
    """Squares of their elements underflow; the update stays finite and at most of its usual size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = natgrad.NaturalMuon(model, momentum=0.0, head=head)
    for step in range(40):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        (10.0 ** -(6 + step) * model(torch.randn(5, 6)).square().mean()).backward()
        optimizer.step()
        for parameter, earlier in zip(model.parameters(), before, strict=True):
            assert (parameter - earlier).abs().amax() < 0.1
    assert not optimizer.preconditioner.metrics()["skipped_gradients"]


@pytest.mark.filterwarnings("ignore:natgrad has curvature for")
def test_adamw_moves_parameters_and_gradients_of_any_strides():
    """AdamW's fused step reads elements in the order of memory."""
    torch.manual_seed(0)
    models = [nn.ModuleDict({"layer": nn.Linear(4, 4), "scale": nn.Bilinear(3, 5, 4)}) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [natgrad.NaturalMuon(model, head="spectral") for model in models]
    for group in optimizers[1].param_groups:
        group["fused"] = False
    for step in range(4):
        gradient = torch.randn(5, 3, 4)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model["layer"](torch.ones(2, 4)).sum().backward()
            # transposed in one step, and expanded in another
            model["scale"].weight.grad = (
                gradient.permute(2, 1, 0) if step % 2 else gradient[0, 0].view(4, 1, 1).expand(4, 3, 5)
            )
            optimizer.step()
    torch.testing.assert_close(models[0]["scale"].weight, models[1]["scale"].weight)


def test_resuming_is_bit_exact():
    straight, resumed = Network(), Network()
    first = natgrad.NaturalMuon(straight, interval=3)
    train(straight, first, 0, 7)
    state = {"model": copy.deepcopy(straight.state_dict()), "optimizer": copy.deepcopy(first.state_dict())}
    train(straight, first, 7, 12)
    second = natgrad.NaturalMuon(resumed, interval=3)
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    train(resumed, second, 7, 12)
    for one, two in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_scaled_loss_moves_as_the_plain_one_and_a_skipped_step_leaves_no_trace():
    plain, scaled = Network(), Network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    first, second = natgrad.NaturalMuon(plain, interval=2), natgrad.NaturalMuon(scaled, interval=2, scaler=scaler)
    for step in range(7):
        x, y = batch(step)
        if step != 3:
            first.zero_grad()
            cross_entropy(plain(x), y).backward()
            first.step()
        second.zero_grad()
        scaler.scale(cross_entropy(scaled(x), y) * (torch.inf if step == 3 else 1)).backward()
        scaler.step(second)
        scaler.update()
    for one, two in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_step_of_nan_moves_nothing():
    model = Network()
    optimizer = natgrad.NaturalMuon(model, head="spectral")
    train(model, optimizer, 0, 3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.zero_grad()
    cross_entropy(model(batch(3)[0]) * torch.nan, batch(3)[1]).backward()
    with pytest.warns(natgrad.NatgradWarning, match="is not finite") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_torch_restores_the_state_into_a_new_optimizer():
    model, other = Network(), Network()
    optimizer, restored = natgrad.NaturalMuon(model, weight_decay=0.1), natgrad.NaturalMuon(other)
    train(model, optimizer, 0, 3)
    other.load_state_dict(model.state_dict())
    restored.preconditioner.load_state_dict(optimizer.preconditioner.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))  # loading does not copy
    set_optimizer_state_dict(other, restored, state)
    assert [group["spectral"] for group in restored.param_groups] == [True, False]
    assert [group["weight_decay"] for group in restored.param_groups] == [0.1, 0.1]
    for each, own in ((model, optimizer), (other, restored)):
        train(each, own, 3, 6)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def muon(gradient):
    """Return a step of Muon at learning rate 1 from rest, with the exact polar factor."""
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    polar = left @ right
    return 0.2 * gradient.numel() ** 0.5 * polar / polar.norm()


class Experts(nn.Module):
    """Two experts, one of which the router has chosen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(5, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x, expert):
        return self.head(self.experts[expert](x).tanh())


@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_an_expert_that_is_reached_between_two_refreshes_moves_by_muon(factor):
    model = Experts().double()
    optimizer = natgrad.NaturalMuon(model, lr=0.01, steps=None)
    for step in range(4):  # 0, 1 and 2 refresh, and then 4
        optimizer.zero_grad()
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        (factor * model(x, step // 3).square().sum()).backward()
        before, gradient = model.experts[1].weight.detach().clone(), model.experts[1].weight.grad
        gradient = gradient if gradient is None else gradient.clone()
        optimizer.step()
    torch.testing.assert_close(model.experts[1].weight, before - 0.01 * muon(gradient), rtol=1e-9, atol=1e-12)


def test_matrices_move_by_muon_if_their_first_roots_fail(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    model = Experts().double()
    optimizer = natgrad.NaturalMuon(model, lr=0.01, steps=None)
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    model(torch.randn(8, 5, dtype=torch.float64), 0).square().sum().backward()
    weight = model.experts[0].weight
    expected = weight.detach() - 0.01 * muon(weight.grad)
    optimizer.step()
    torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
    assert optimizer.preconditioner.metrics()["failed_decompositions"] > 0


def test_layers_that_are_thawed_train_from_then_on():
    model = Network()
    frozen = ("convolution.weight", "convolution.bias", "shift")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = natgrad.NaturalMuon(model, lr=0.02)
    assert {"convolution.weight"} <= names(model, optimizer.param_groups[0])
    assert {"convolution.bias", "shift"} <= names(model, optimizer.param_groups[1])
    steps = moved(model, optimizer)
    assert not any(steps[name].any() for name in frozen)
    for name in frozen:
        model.get_parameter(name).requires_grad_(True)
    for step in range(1, 5):  # with and without a refresh
        steps = moved(model, optimizer, step)
        assert steps["shift"].any()
        rms = steps["convolution.weight"].square().mean().sqrt().item()
        assert rms == pytest.approx(0.2 * 0.02, rel=1e-3)


def test_a_spread_refresh_gives_every_layer_roots_in_the_first_one():
    model = Network()
    optimizer = natgrad.NaturalMuon(model, refresh=natgrad.Refresh(factors=8, inverses=8, spread=4))
    train(model, optimizer, 0, 1)
    for block in optimizer.preconditioner.state_dict()["blocks"].values():
        assert block["root_G"].any()


def test_verify_compares_layers_that_have_roots():
    model = Network()
    optimizer = natgrad.NaturalMuon(model, dtype=None)
    train(model, optimizer, 0, 7)

    def loss(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    assert optimizer.preconditioner.verify(batch(7), loss).worst < 1e-4


@pytest.mark.parametrize("change", [{"measure": "drift"}, {"separate": True}, {"spread": 0}])
def test_a_rule_that_cannot_be_spread_is_refused(change):
    rule = natgrad.RefreshRule()
    for name, value in {"spread": 4, **change}.items():
        setattr(rule, name, value)
    with pytest.raises(ValueError, match="spread"):
        natgrad.Preconditioner(Network(), refresh=rule)


@pytest.mark.filterwarnings("ignore:natgrad. no layer of the model is covered")
def test_a_backbone_may_be_thawed_after_the_head_has_trained_alone():
    model = Network()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.head.weight or parameter is model.head.bias)
    optimizer = natgrad.NaturalMuon(model)
    steps = moved(model, optimizer)
    assert {name for name, step in steps.items() if step.any()} == {"head.weight", "head.bias"}
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    steps = moved(model, optimizer, 1)
    assert all(step.any() for step in steps.values())
    train(model, optimizer, 2, 4)
    assert "attention.out_proj.weight" in optimizer.preconditioner.state_dict()["blocks"]


def test_momentum_is_read_from_the_groups_by_either_name_and_saved():
    """As one that was built with it."""
    wanted, by_momentum, by_betas = Network(), Network(), Network()
    expected = natgrad.NaturalMuon(wanted, momentum=0.5)
    first, second = natgrad.NaturalMuon(by_momentum), natgrad.NaturalMuon(by_betas)
    first.param_groups[0]["momentum"] = 0.5
    second.param_groups[0]["betas"] = (0.5, 0.95)
    for model, optimizer in ((wanted, expected), (by_momentum, first), (by_betas, second)):
        train(model, optimizer, 0, 6)
    for model in (by_momentum, by_betas):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), wanted.parameters(), strict=True))
    resumed = natgrad.NaturalMuon(Network())
    resumed.load_state_dict(first.state_dict())
    assert resumed.param_groups[0]["momentum"] == resumed.param_groups[0]["betas"][0] == 0.5


def test_one_cycle_moves_momentum_and_rate():
    model, seen = Network(), []
    optimizer = natgrad.NaturalMuon(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=8)
    for step in range(6):
        train(model, optimizer, step, step + 1)
        seen.append(optimizer.param_groups[0]["momentum"])
        scheduler.step()
    assert max(seen) == pytest.approx(0.95)
    assert min(seen) < 0.86


@pytest.mark.parametrize("momentum", [1.0, -0.1, "0.9"])
def test_a_momentum_that_is_not_allowed_is_refused_before_anything_moves(momentum):
    model = Network()
    optimizer = natgrad.NaturalMuon(model)
    optimizer.param_groups[0]["momentum"] = momentum
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"momentum=.* is not allowed"):
        train(model, optimizer, 0, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weight_decay_of_matrices_alone():
    model = Network()
    optimizer = natgrad.NaturalMuon(model, weight_decay=0.1, decay="matrices")
    groups = [(names(model, group), group["weight_decay"]) for group in optimizer.param_groups]
    assert groups[0] == (MATRICES - {"head.weight"}, 0.1)
    assert groups[1] == ({"head.weight"}, 0.1)
    assert groups[2][1] == 0
    assert {"table.weight", "norm.weight", "shift", "head.bias"} <= groups[2][0]
    model.no_weight_decay = lambda: {"head.weight"}
    groups = natgrad.NaturalMuon(model, weight_decay=0.1, decay="matrices").param_groups
    assert "head.weight" in names(model, groups[2])


def test_added_groups_hold_what_one_method_moves_and_options_that_a_group_can_have():
    model = Network()
    optimizer = natgrad.NaturalMuon(model)
    spare, groups = nn.Parameter(torch.zeros(2)), len(optimizer.param_groups)
    with pytest.raises(ValueError, match=r"param_group\['power'\]=0.5 is not allowed"):
        optimizer.add_param_group({"params": [spare], "power": 0.5})
    matrices = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"], moved_apart = matrices[1:], matrices[:1]
    with pytest.raises(ValueError, match="either matrices that natural Muon moves, or parameters that AdamW moves"):
        optimizer.add_param_group({"params": [*moved_apart, spare]})
    assert len(optimizer.param_groups) == groups
    optimizer.add_param_group({"params": moved_apart, "lr": 0.0})
    steps = moved(model, optimizer)
    (name,) = names(model, optimizer.param_groups[-1])
    assert not steps[name].any()
    assert all(steps[other].any() for other in names(model, optimizer.param_groups[0]))


def test_a_rate_may_be_a_tensor_that_is_filled_later():
    models, rate = (Network(), Network()), torch.tensor(0.02)
    first, second = natgrad.NaturalMuon(models[0], lr=0.02), natgrad.NaturalMuon(models[1], lr=rate)
    train(models[0], first, 0, 2)
    train(models[1], second, 0, 2)
    for group in first.param_groups:
        group["lr"] = 0.01
    rate.fill_(0.01)
    train(models[0], first, 2, 4)
    train(models[1], second, 2, 4)
    torch.testing.assert_close([*models[0].parameters()], [*models[1].parameters()])
    with pytest.raises(ValueError, match="lr="):
        natgrad.NaturalMuon(Network(), lr=torch.tensor(-0.1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_may_change_its_dtype(dtype):
    """Momentum, roots and AdamW's moments follow."""
    model = Network()
    optimizer = natgrad.NaturalMuon(model)
    train(model, optimizer, 0, 3)
    model.to(dtype)
    moves = moved(model, optimizer, 3)
    assert all(move.dtype == dtype and move.any() for move in moves.values())
    train(model, optimizer, 4, 8)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Embedding(11, 8, sparse=True), "without sparse=True in 'table': AdamW"),
        (nn.EmbeddingBag(11, 8, sparse=True), "without sparse=True in 'table': AdamW"),
        (nn.LazyLinear(8), "called once before, so that 'table' get their parameters"),
    ],
)
def test_layers_that_it_cannot_move_are_refused_by_name(layer, message):
    model = Network()
    model.table = layer
    with pytest.raises(ValueError, match=message):
        natgrad.NaturalMuon(model)
    if isinstance(layer, nn.EmbeddingBag):
        layer.requires_grad_(False)
        natgrad.NaturalMuon(model)


def test_a_state_in_which_other_factors_were_whole_is_refused():
    model = nn.Sequential(nn.Linear(300, 8), nn.Tanh(), nn.Linear(8, 3))
    before = natgrad.NaturalMuon(model, full_factors=True)
    model(torch.randn(4, 300, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    before.step()
    with pytest.raises(ValueError, match=r"0\.weight.*'A'.*a version in which other factors of natural Muon"):
        natgrad.NaturalMuon(copy.deepcopy(model)).load_state_dict(before.state_dict())


@pytest.mark.cpu
@pytest.mark.parametrize("fast", [True, False])
def test_products_are_in_bfloat16_where_torch_says_that_the_processor_has_them(fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "avx512_bf16": fast}, raising=False)
    shown = natgrad.NaturalMuon(Network()).preconditioner.explain().rows
    assert any("bfloat16" in str(row.curvature) for row in shown) == fast
