import copy

import pytest
import torch
from torch import nn

from natgrad.training import contenders, optimizers
from natgrad.training.job import Job


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.hidden = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(5, 7)

    def forward(self, ids):
        values = self.convolution(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(self.frozen(self.norm(self.hidden(values))))


def gradients(net):
    torch.manual_seed(1)
    net.zero_grad()
    ids = torch.randint(7, (4, 9))
    nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()


@pytest.mark.parametrize("name", optimizers.names())
def test_every_optimizer_of_torch_trains(name):
    torch.manual_seed(0)
    net = Net()
    optimizer = optimizers.build(optimizers.current_name(name.upper()), net, optimizers.default_learning_rate(name), {})
    before = net.head.weight.clone()

    def closure():
        gradients(net)
        return torch.tensor(1.0)

    optimizer.step(closure)
    assert not torch.equal(net.head.weight, before)


def test_muon_takes_the_hidden_matrices_alone():
    net = Net()
    matrices, others = optimizers.split_for_muon(net)
    assert [id(each) for each in matrices] == [id(net.convolution.weight), id(net.hidden.weight)]
    trained = {id(each) for each in net.parameters() if each.requires_grad}
    assert {id(each) for each in others} == trained - {id(each) for each in matrices}


def test_muon_moves_a_kernel_as_a_matrix():
    torch.manual_seed(0)
    net = Net()
    optimizer = optimizers.build("muon", net, 0.02, {})
    matrix = nn.Parameter(net.convolution.weight.detach().flatten(1).clone())
    reference = torch.optim.Muon([matrix], lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        gradients(net)
        matrix.grad = net.convolution.weight.grad.flatten(1).clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(net.convolution.weight.flatten(1), matrix)


def test_muon_resumes_from_its_state_and_follows_its_learning_rate():
    torch.manual_seed(0)
    net = Net()
    optimizer = optimizers.build("muon", net, 0.02, {})
    gradients(net)
    optimizer.step()
    other = Net()
    other.load_state_dict(net.state_dict())
    resumed = optimizers.build("muon", other, 0.5, {})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, each in ((net, optimizer), (other, resumed)):
        gradients(model)
        each.step()
    assert torch.equal(net.hidden.weight, other.hidden.weight)
    for group in resumed.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(other.state_dict())
    gradients(other)
    resumed.step()
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_value_that_an_optimizer_refuses_is_an_error_of_value():
    with pytest.raises(ValueError, match="momentum"):
        optimizers.build("sgd", Net(), 0.1, {"momentum": -1})
    with pytest.raises(ValueError, match="betas"):
        optimizers.build("adamw", Net(), 0.1, {"betas": 3})


def test_muon_refuses_kernels_that_are_no_matrix_in_memory():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="view"):
        optimizers.build("muon", net, 0.02, {})


@pytest.mark.parametrize("name", ["natural-muon", "natural_muon", "NaturalMuon"])
def test_natural_muon_has_one_name(name):
    assert Job(task="digits", optimizer=name).optimizer == "natural-muon"
    assert contenders.get(name).name == "natural-muon"
