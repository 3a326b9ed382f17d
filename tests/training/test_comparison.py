import json

import pytest

from natgrad.training import search
from natgrad.training.compare import Comparison, compare


def test_a_comparison_runs_on_the_seeds_asked_for(tmp_path):
    comparison = Comparison(
        task_names=("tabular",), optimizers=("adamw",), seeds=2, first_seed=7, epochs={"tabular": 1}
    )
    told = []
    [outcome] = compare(comparison, tmp_path, lambda what, done, total, new: told.append(what))
    jobs = [json.loads(line)["job"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [job["seed"] for job in jobs] == [7, 8]
    assert "tabular: adamw, seed 8" in told
    recorded = outcome.to_json()
    assert recorded["first_seed"] == 7
    first, second = recorded["runs"]["adamw"]
    assert first["points"][-1]["loss"] != second["points"][-1]["loss"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"first_seed": -1}, "first_seed=-1"),
        ({"first_seed": search.SEED - 2}, f"no seed is {search.SEED}"),
        ({"first_seed": search.SEED}, f"no seed is {search.SEED}"),
    ],
)
def test_seeds_that_a_search_uses_are_refused(values, named):
    with pytest.raises(ValueError, match=named):
        Comparison(task_names=("tabular",), **values)
