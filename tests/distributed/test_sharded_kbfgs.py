"""K-BFGS on sharded models: the mean outputs that it compares are made of weights that no rank has whole."""

from dataclasses import replace

import pytest

import natgrad
from tests.distributed.sharded_jobs import Case, Training, Zoo, error

CASE = Case(
    kind="KBFGS", closure=True, kl_clip=0.1, lr=0.05, options={"refresh": natgrad.Refresh(factors=1, inverses=1)}
)


def train(case):
    training = Training(case)
    for step in range(5):
        training.step(step)
    return training.parameters(), training.preconditioner.traffic(), training.preconditioner.plan.traffic()


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("count", "change", "where"),
    [
        (1, {}, {}),
        (2, {}, {"placement": "mem-opt"}),
        (4, {}, {}),
        (4, {}, {"mesh": (2, 2), "placement": "hybrid:0.5"}),
        (4, {"curvature": {"memory": 3}}, {"wrapper": "root", "placement": "reduce-scatter"}),
        (4, {"network": Zoo}, {"placement": "mem-opt"}),
        (4, {"evaluate": True}, {"wrapper": "keep whole"}),
    ],
)
def test_ranks_equal_one_process(ranks, count, change, where):
    case, where = replace(CASE, **change), dict(where)
    expected = train(case)[0]
    assert error(train(replace(case, kind="KFAC", curvature={}))[0], expected) > 1e-3
    options = case.options | {"placement": where.pop("placement", "comm-opt")}
    for parameters, _, _ in ranks.run(count, train, replace(case, options=options, **where)):
        assert error(parameters, expected) <= 1e-8


@pytest.mark.some(2)
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "reduce-scatter"])
def test_the_plan_tells_what_travels(ranks, placement):
    answers = ranks.run(4, train, replace(CASE, options=CASE.options | {"placement": placement}))
    assert sum(sent["replay"] for _, sent, _ in answers) == 5 * 8 * answers[0][2]["factors"]["replay"]
