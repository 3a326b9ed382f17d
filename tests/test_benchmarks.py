"""What the benchmarks claim to time: the right mixture of steps, in turn, on the right matrices."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from torch import nn

import natgrad
from benchmarks import curvature, curvature_limit, daso, daso_training, memory, step
from benchmarks.common import CPU, RESULTS, interleave, timer
from benchmarks.limit import Limit
from benchmarks.models import WORKLOADS, Workload
from benchmarks.peers import NEVER, PHASES, Trainer, factor_interval, inverse_interval, natgrad_kfac
from benchmarks.placement import ALONE, DDP, WANTED_SLOW, Shares, Summary
from benchmarks.placement_cycle import CYCLE, KINDS, SPANS, STEPS, Intervals, cycle, merge
from benchmarks.placement_report import Result, wanted
from benchmarks.step import SETTINGS

TWO_NODES = Path(__file__).parents[1] / "benchmarks" / "two_nodes.sh"


def small() -> Workload:
    return Workload(
        title="small",
        architecture=lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        batch=lambda: (torch.randn(8, 5), torch.randint(3, (8,))),
        reduction="mean",
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_mean_step_is_that_of_the_whole_schedule(setting):
    cost = dict(zip(PHASES, (7.0, 3.0, 1.0), strict=True))
    schedule = [
        cost["inverses" if step % setting.inverses == 0 else "factors" if step % setting.factors == 0 else "plain"]
        for step in range(setting.inverses)
    ]
    times = {f"any/{phase}": np.array([seconds]) for phase, seconds in cost.items()}
    assert setting.mean(times, "any") == pytest.approx(np.mean(schedule))


def test_every_cycle_has_the_three_phases_in_order():
    due = [(factor_interval(step) < NEVER, inverse_interval(step) < NEVER) for step in range(6)]
    assert due == 2 * [(True, True), (True, False), (False, False)]


def test_interleaving_visits_every_subject_once_a_round_and_drops_the_first():
    visits = []

    def subject(name):
        def run():
            visits.append(name)
            return {"lap": float(len(visits))}

        return run

    times = interleave({name: subject(name) for name in "abc"}, rounds=4, title="")
    assert all(sorted(visits[start : start + 3]) == ["a", "b", "c"] for start in range(0, 15, 3))
    assert {name: len(values) for name, values in times.items()} == {"a/lap": 4, "b/lap": 4, "c/lap": 4}
    assert min(values.min() for values in times.values()) > 3


def test_limit_multiplies_the_rows_that_make_the_gradient():
    """W = (1/N) Σ g aᵀ: the rows that the limit's products are timed on give each layer's gradient."""
    convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
    workload = Workload(
        title="small",
        architecture=lambda: nn.Sequential(convolution, nn.Tanh(), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(80, 6)),
        batch=lambda: (torch.randn(7, 3, 8, 8), torch.randint(6, (7,))),
        reduction="mean",
    )
    limit = Limit(Trainer(workload))
    limit.laps()
    for layer in limit.layers:
        rows_A, rows_G = layer.rows
        torch.testing.assert_close(rows_G.T @ rows_A / 7, layer.gradient)
        torch.testing.assert_close(layer.products[0], rows_A.T @ rows_A)
        torch.testing.assert_close(layer.products[1], rows_G.T @ rows_G)
    assert [tuple(layer.gradient.shape) for layer in limit.layers] == [(4, 27), (5, 5), (6, 81)]


def test_what_is_timed_is_where_it_is_told():
    """On "meta", which every machine has and whose tensors go with no others."""
    meta = torch.device("meta")
    trainer = Trainer(small(), device=meta)
    trainer.cycle()
    limit = Limit(trainer)
    limit.laps()
    for layer in limit.layers:
        assert {each.device for pair in (layer.rows, layer.damped, layer.rotated) for each in pair} == {meta}
    for layer in curvature_limit.layers("resnet32", 8, 4, meta)[:2]:
        for run in curvature_limit.LIMITS.values():
            run(layer)
        assert {each.device for each in (*layer.rows, *layer.factors, layer.kernel)} == {meta}


def test_bytes_are_those_of_one_device():
    before = {device: curvature.tensor_bytes(torch.device(device)) for device in ("cpu", "meta")}
    kept = torch.ones(1000)
    assert curvature.tensor_bytes(CPU) - before["cpu"] == kept.nbytes
    assert curvature.tensor_bytes(torch.device("meta")) == before["meta"]


def test_clock_of_a_gpu_is_read_when_that_has_settled(monkeypatch):
    seen = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: seen.append(device.type))
    monkeypatch.setattr("benchmarks.common.CLOCKS", {"wall": lambda: seen.append("read")})
    timer("wall", torch.device("cuda"))()
    timer("wall", CPU)()
    assert seen == ["cuda", "read", "read"]


def test_what_a_gpu_cannot_do_is_refused():
    with pytest.raises(typer.BadParameter, match="wall clock"):
        step.main(clock="cpu", device="cuda")
    with pytest.raises(typer.BadParameter, match="wall clock"):
        curvature.main(clock="cpu", device="cuda")
    with pytest.raises(typer.BadParameter, match="one rank"):
        curvature.main(ranks=2, device="cuda")


@pytest.mark.parametrize(("device", "share"), [("cpu", "0.50 (≤ 0.7: met)"), ("cuda", "0.80 (≤ 0.7: not met)")])
def test_memory_is_judged_by_what_its_device_counts(device, share):
    rows = [
        memory.Memory(method=method, form="eigen", resident=resident, live=live, accumulated=1.0, kept=1.0)
        for method, resident, live in (("natgrad", 5.0, 4.0), ("kfac-pytorch", 10.0, 5.0))
    ]
    shown = memory.show("", rows, memory.JUDGED[device])
    assert list(shown.columns[-1].cells) == [share, ""]


def test_a_file_keeps_what_was_measured_before_under_the_same_conditions():
    settings, names = {"clock": "cpu", "rounds": 1}, list(curvature.METHODS)[:3]
    old, new = ([{"method": name, "refresh_ms": value} for name in names] for value in (1.0, 2.0))
    found = curvature.merged({}, settings, "resnet32", old)
    found = curvature.merged(found, settings, "bert", old)
    found = curvature.merged(found, settings, "bert", new[1:])
    assert found == {**settings, "resnet32": old, "bert": [old[0], *new[1:]]}
    assert curvature.merged(found, settings | {"rounds": 3}, "bert", new) == {"clock": "cpu", "rounds": 3, "bert": new}


def placement_times(milliseconds, *, rounds=2):
    """Laps of configurations whose every step takes the same time; of the bare work, 1 s a kind."""
    names = {**milliseconds, ALONE: 1.0}
    times = {
        f"{n}/{s}/{q}": np.full(rounds, ms * STEPS[s]) for n, ms in names.items() for s in STEPS for q in QUANTITIES
    }
    return times | {f"limit/{kind}/seconds": np.ones(rounds) for kind in ("capture", "decomposition", "solve")}


QUANTITIES = ("seconds", "cpu", "exposed", "sent", "wire")


@pytest.mark.parametrize("spilled", [0.0, 4.0], ids=["at once", "left to the next step"])
def test_placement_mean_is_that_of_a_hundred_steps(spilled):
    cost = {"inverses": 30.0, "factors": 7.0, "plain": 1.0}

    def seconds(kinds, before):
        return [
            cost[k] + (spilled if last == "inverses" else 0.0) for k, last in zip(kinds, [before, *kinds], strict=False)
        ]

    schedule = ["inverses" if step == 0 else "factors" if step % 10 == 0 else "plain" for step in range(100)]
    taken, last, spans = 0, "plain", {}
    steps = seconds(KINDS, "plain")
    for span, kinds in SPANS:
        spans[span] = np.array([sum(steps[taken : taken + len(kinds)])])
        taken += len(kinds)
        last = kinds[-1]
    assert last == "plain"  # the next cycle begins at rest
    assert Intervals(10, 100).mean(spans)[0] == pytest.approx(np.mean(seconds(schedule, "plain")))
    assert Intervals(1, 1).mean(spans)[0] == pytest.approx(cost["inverses"] + spilled)


def test_placement_cycle_renews_what_its_spans_say():
    trainer = Trainer(small())
    own = natgrad_kfac("eigen", placement="comm-opt", intervals=CYCLE)(trainer)
    assert isinstance(own, natgrad.Preconditioner)
    trainer.preconditioner = own
    for repeat in (1, 2):
        laps = cycle(trainer)
        metrics = own.metrics()
        assert metrics["inverse_updates"] == repeat * KINDS.count("inverses")
        assert metrics["factor_updates"] == repeat * (len(KINDS) - KINDS.count("plain"))
    assert {f"{span}/{quantity}" for span, _ in SPANS for quantity in QUANTITIES} == set(laps)


def test_placement_ranks_merge_as_the_slowest_the_mean_and_the_sum():
    ranks = [
        {
            "a/full/seconds": np.array([1.0, 5.0]),
            "a/full/cpu": np.array([1.0, 5.0]),
            "a/full/wire": np.array([1.0, 5.0]),
        }
    ]
    ranks.append({lap: np.array([3.0, 4.0]) for lap in ranks[0]})
    expected = {"a/full/seconds": [3.0, 5.0], "a/full/cpu": [2.0, 4.5], "a/full/wire": [4.0, 9.0]}
    assert {lap: list(values) for lap, values in merge(ranks).items()} == expected


def test_placement_ratios_are_over_what_they_say():
    milliseconds = {DDP: 2.0, "comm-opt": 6.0, "dp": 3.0, "dp, reduce": 4.0, "kfac-pytorch comm-opt": 12.0}
    times = placement_times(milliseconds)
    rows = {(row.name, row.intervals): row for row in Summary(times, 2, timed=True, wired=True).rows()}
    dp = rows["dp", "(1, 1)"]
    assert (dp.over_ddp, dp.over_comm_opt, dp.over_peer) == pytest.approx((1.5, 0.5, None))
    assert rows[DDP, "(1, 1)"].exposed_ms == pytest.approx(1000)  # 2 s less the 1 s without messages
    assert dp.over_limit == pytest.approx(3 / (2 + 1 / 2 + 1 / 2 + 1 / 2))
    assert rows["comm-opt", "(10, 100)"].over_limit == pytest.approx(6 / (2 + 1 / 10 + 1 / 2 / 100 + 1))
    met = {row.name: row.figure.measured for row in wanted(list(rows.values()), WANTED_SLOW)}
    assert met == pytest.approx({"dp": 0.5})
    untimed = Summary(times, 4, timed=False, wired=False).rows()
    assert all(row.milliseconds is None and row.over_ddp is None and row.wire_mb is None for row in untimed)
    assert not wanted(untimed, WANTED_SLOW)


def test_hybrid_solves_no_less_than_its_own_layers():
    assert [Shares.of("hybrid:0.5", ranks).solve for ranks in (1, 2, 4)] == [1.0, 0.5, 0.5]
    assert [Shares.of("mem-opt", ranks).solve for ranks in (1, 2, 4)] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rat", "200mbit"], "unknown option --rat"),
        (["--rate", "200", "--", "x.py"], "--rate 200"),
        (["--per-node", "0", "--", "x.py"], "--per-node 0"),
        (["--port"], "--port needs a value"),
        ([], "no script"),
    ],
)
def test_two_nodes_refuses_what_it_cannot_do(options, told):
    done = subprocess.run(["bash", TWO_NODES, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr


def test_two_nodes_tells_its_options():
    done = subprocess.run(["bash", TWO_NODES, "--help"], capture_output=True, text=True, check=True)
    assert all(option in done.stdout for option in ("--rate", "--per-node", "--port"))


def test_daso_steps_are_compared_with_ddp_round_by_round():
    seconds = {daso.ALONE: [1.0, 2.0], daso.DDP: [8.0, 6.0], "DASO(4, 1)": [2.0, 3.0]}
    times = {
        f"{name}/step/{what}": np.array(own) for name, own in seconds.items() for what in ("seconds", "cpu", "wire")
    }
    found = {row.name: row for row in daso.rows(times, timed=True, wanted=True)}
    own = found["DASO(4, 1)"]
    assert (own.seconds, own.faster, own.exposed) == (2.5, 3.0, 1.0)
    assert own.wanted == daso.WANTED["DASO(4, 1)"]
    assert found[daso.DDP].wanted is None
    untimed = daso.rows(times, timed=False, wanted=True)
    assert all(row.seconds is None and row.faster is None and row.wanted is None for row in untimed)


def test_daso_laps_are_whole_cycles():
    assert daso.LAP % 8 == daso.LAP % 4 == 0
    assert sum(each.numel() for each in daso.perceptron().parameters()) == 5_402_880


def test_daso_training_reaches_what_a_mean_of_losses_says():
    window = daso_training.WINDOW
    last = daso_training.Point(
        epoch=1,
        step=2 * window,
        seconds=2.0 * window,
        loss=1.0,
        metric=0.5,
        learning_rate=0.1,
        samples_per_second=1.0,
        share=0.0,
        peak_bytes=1,
    )
    seconds = [float(step + 1) for step in range(2 * window)]
    slow = daso_training.Run(last=last, seconds=seconds, losses=[3.0] * window + [1.0] * window)
    fast = daso_training.Run(last=last, seconds=seconds, losses=[1.0] * window + [0.5] * window)
    assert slow.smooth[0] == 3.0
    assert slow.smooth[-1] == 1.0
    assert slow.reaches(2.0) == window + window // 2 - 1
    assert slow.reaches(0.9) is None
    rows = {row.name: row for row in daso_training.rows({daso_training.DDP: [slow], "fast": [fast]})}
    assert (rows["fast"].steps, rows["fast"].faster, rows["fast"].reached) == (window, 2.0, 1)
    assert (rows[daso_training.DDP].steps, rows[daso_training.DDP].faster) == (2 * window, 1.0)


def test_results_on_file_are_read():
    """A later run of a part keeps what its file has of the others."""
    files = sorted(RESULTS.glob("placement_*.json"))
    assert files
    for path in files:
        stored = json.loads(path.read_text())
        for name in WORKLOADS:
            assert Result.read(stored[name]).rows
