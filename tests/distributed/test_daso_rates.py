"""DASO's mean loss, schedulers that follow it, and ranks of a node that do not train alike."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

import natgrad
from tests.distributed.daso_jobs import Run, Training, identical


def reduce_on_plateau():
    """Train four epochs whose loss never falls by a tenth; return global losses, their expected values, and rates."""
    training = Training(Run(options={"batches_between": 2}, lr=1e-4))
    training.scheduler = torch.optim.lr_scheduler.ConstantLR(training.optimizer, 1.0)
    plateau = ReduceLROnPlateau(training.optimizer, factor=0.5, patience=1, threshold=0.1)
    daso, rates = training.daso, []
    found, expected = [daso.global_loss], [None]
    for _ in range(4):
        losses = [training.step() for _ in range(training.run.steps)]
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, losses)
        found.append(daso.global_loss)
        expected.append(sum(map(sum, everywhere)) / (len(losses) * len(everywhere)))
        plateau.step(daso.global_loss)
        rates.append(training.optimizer.param_groups[0]["lr"])
    state = daso.state_dict()
    for _ in range(training.run.steps):
        daso.step()
    without_losses = daso.global_loss
    daso.load_state_dict(state)
    restored = daso.global_loss
    daso.detach()
    return found, expected, rates, without_losses, restored


def test_a_scheduler_follows_the_mean_loss_of_all_ranks(ranks):
    everyone = ranks.run(4, reduce_on_plateau)
    for found, expected, rates, without_losses, restored in everyone:
        assert found[0] is None
        assert found[1:] == pytest.approx(expected[1:], rel=1e-12)
        assert rates == [1e-4, 1e-4, 5e-5, 5e-5]
        assert without_losses is None
        assert restored == found[-1]
    assert all(found == everyone[0][0] for found, *_ in everyone)


def follow_own_loss(rank):
    """One rank lowers its rate after the first epoch; return the completed steps and the error."""
    training = Training(Run(options={"batches_between": 2}))
    steps = 0
    try:
        for step in range(12):
            if step == 6 and dist.get_rank() == rank:
                training.optimizer.param_groups[0]["lr"] = 0.01
            training.step()
            steps += 1
    except natgrad.AveragingError as error:
        return steps, str(error)
    return steps, None


def test_rates_that_differ_inside_a_node_are_an_error_on_all_ranks(ranks):
    for steps, message in ranks.run(4, follow_own_loss, 3):
        assert steps == 6
        assert "learning rates: [0.05] on ranks [2], [0.01] on ranks [3]" in message
        assert "daso.global_loss" in message


def follow_own_loss_by_node():
    """Nodes of one rank have rates of their own; return what was warned of, and the parameters."""
    training = Training(Run(sizes=(1, 1), options={"batches_between": 2}, lr=0.1 / (1 + dist.get_rank())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            training.step()
    training.daso.detach()
    return [str(warning.message) for warning in caught], training.parameters()


def test_nodes_may_have_rates_of_their_own(ranks):
    (messages, parameters), (_, others) = ranks.run(2, follow_own_loss_by_node)
    assert not messages
    assert identical(parameters, others)


def drift(wrapper, warmup, rank):
    """One rank decays its weights; return the warnings of two epochs, and the parameters after them."""
    options = {"batches_between": 2, "warmup_epochs": warmup}
    training = Training(Run(options=options, wrapper=wrapper))
    if dist.get_rank() == rank:
        training.optimizer.param_groups[0]["weight_decay"] = 0.1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            training.step()
    training.daso.detach()
    messages = [str(each.message) for each in caught if issubclass(each.category, natgrad.NatgradWarning)]
    return messages, training.parameters()


@pytest.mark.parametrize(("wrapper", "warmup"), [("none", 0), ("ddp", 2)])
def test_weights_that_drift_apart_inside_a_node_are_warned_of_once(ranks, wrapper, warmup):
    everyone = ranks.run(4, drift, wrapper, warmup, 3)
    for rank, (messages, parameters) in enumerate(everyone):
        assert len(messages) == (1 if rank >= 2 else 0)
        assert all("ranks of node 1 have different weights (0.weight: norms from" in message for message in messages)
        assert identical(parameters, everyone[0][1])
