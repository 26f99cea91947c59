"""``hydra/sweeper=robust_optuna`` and ``robust_grid``: no barrier, one study."""

import contextlib
import json
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from robust_train.folder.journal import Journal
from robust_train.model.errors import ConfigError
from robust_train.model.events import ValueReported
from robust_train.sweep.checks import SweeperSettings
from robust_train.sweep.pruning import Reports
from robust_train.sweep.record import SweepJob, SweepTable
from robust_train.sweep.sweeper import sweep
from world import wait_until

optuna = pytest.importorskip("optuna", "4", reason="the extra [sweep]")

SEARCH = ["hydra/sweeper=robust_optuna", "hydra.sweeper.sampler.seed=1"]
SPACE = "training.lr=tag(log,interval(1e-4,1e-2))"


def _arguments(sweeps, trainer, trials, *more, n_jobs=1):
    numbers = [f"hydra.sweeper.n_trials={trials}", f"hydra.sweeper.n_jobs={n_jobs}"]
    return sweeps.arguments(trainer, *SEARCH, *numbers, SPACE, *more, n_jobs=None)


def _study(sweeps):
    backend = optuna.storages.journal.JournalFileBackend(str(sweeps.folder / "study.jsonl"))
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name="sweep", storage=storage).trials


@pytest.mark.parametrize(
    "sweeper", ["robust_optuna", pytest.param("robust_grid", marks=pytest.mark.slow)]
)
def test_a_job_starts_as_soon_as_another_ends(sweeps, sweeper):
    """The first job ends only after the third has: in batches of two it would wait for ever."""
    trainer = "first_waits_for_the_third"
    arguments = _arguments(sweeps, trainer, 3, n_jobs=2)
    if sweeper == "robust_grid":
        grid = ("hydra/sweeper=robust_grid", "hydra.sweeper.n_jobs=2")
        arguments = sweeps.arguments(trainer, *grid, "training.lr=1e-4,1e-3,1e-2", n_jobs=None)
    ended = sweeps.world.run(*arguments, code=0)
    assert sweeps.column("result") == [0.0, 1.0, 2.0]
    assert "Warning" not in ended.output


def test_a_killed_search_resumes_its_study(sweeps):
    seed = "hydra.sweeper.sampler.seed=20261126"  # a date is as good as 1
    arguments = _arguments(sweeps, "works_until_told_in_every_third", 4, seed)
    launcher = sweeps.world.start(*arguments)
    wait_until(lambda: (sweeps.place / "working-2").exists(), "the third trial is at work")
    before = [trial.params for trial in _study(sweeps)]
    launcher.kill()
    launcher.communicate()
    with (sweeps.folder / "study.jsonl").open("a") as file:
        file.write('{"op_code":4,"worker')  # as a power cut leaves it
    sweeps.world.run(*arguments, code=0)
    assert sweeps.column("result") == [0.0, 1.0, 102.0, 3.0], "the third continued where it was"
    assert sweeps.column("reused") == [True, True, False, False]
    assert len(before) == 3
    assert [trial.params for trial in _study(sweeps)][:3] == before
    sweeps.world.run(*_arguments(sweeps, "works_until_told_in_every_third", 5, seed), code=0)
    assert sweeps.column("result") == [0.0, 1.0, 102.0, 3.0, 4.0], "n_trials is the total"
    assert _study(sweeps)[2].value == 102.0


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_ten_kills_at_random_change_nothing(sweeps):
    """Serially, so that a seeded sampler sees the same results before each trial."""
    trials, rng = [], random.Random(7)
    for kills in (0, 10):
        sweeps.folder = sweeps.world.folder / f"killed-{kills}"
        arguments = _arguments(sweeps, "counts_to_20", 6, "max_launches=0")
        for _ in range(kills):
            launcher = sweeps.world.start(*arguments)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(rng.uniform(1, 6))
            launcher.kill()
            launcher.communicate()
        sweeps.world.run(*arguments).with_code(0)
        assert sweeps.column("status") == ["completed"] * 6
        trials.append([(trial.params, trial.value) for trial in _study(sweeps)])
        assert len(trials[-1]) == 6, "as many as asked"
    assert trials[0] == trials[1]


def test_sweep_patience_stops_jobs_that_are_behind(sweeps):
    """In a grid. The second job reports a third of what the first did, at each step. What
    another sweep has left in the folder does not count.
    """
    for number in ("1", "2"):
        SweepJob(int(number), ("training.lr=9",), "another").write(sweeps.folder / number)
        journal = Journal(sweeps.folder / number / "journal.jsonl")
        for step in range(1, 41):
            journal.write(ValueReported(9.0 * step, step))
    patience = ("training.lr=3,1", "sweep_patience=3")
    sweeps.sweep("reports_its_rate", *patience, n_jobs=1, code=0)
    assert sweeps.column("status") == ["completed", "pruned"]
    assert sweeps.column("exit_code") == [0, 0]
    assert sweeps.jobs[1]["reason"] == "worse than another job at 3 reports in a row"
    summary = sweeps.summary(1)
    assert (summary["status"], Path(summary["checkpoint"]).name[:5]) == ("pruned", "step-")
    assert sweeps.jobs[1]["step"] < 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "code", "why"),
    [
        ("fails_at_2", 1, "two is not for me"),
        ("diverges_at_2", 0, "its result is not a number: nan"),
    ],
)
def test_a_failed_trial_does_not_end_the_search(sweeps, trainer, code, why):
    """It says why it failed."""
    drawn = ("seed=range(1,3)", "hydra.sweeper.sampler.seed=3")
    sweeps.world.run(*_arguments(sweeps, trainer, 4, *drawn, n_jobs=2), code=code)
    trials = _study(sweeps)
    assert {trial.state.name for trial in trials} == {"COMPLETE", "FAIL"}
    failed = next(trial for trial in trials if trial.state.name == "FAIL")
    assert why in failed.user_attrs["reason"]


@pytest.mark.slow
def test_repeated_trials_report_the_mean_over_seeds(sweeps):
    """Each has a seed of its own."""
    repeated = ("hydra.sweeper.repeat=2", "seed=7")
    ended = sweeps.world.run(*_arguments(sweeps, "objective", 2, *repeated, n_jobs=2), code=0)
    assert sorted(sweeps.ran) == ["7", "7", "8", "8"]
    assert [trial.value for trial in _study(sweeps)] == [11.25, 11.25]
    assert sweeps.column("job") == [0, 1, 2, 3]
    assert "11.25 ± 1.06  2 of 2" in ended.stdout


@pytest.mark.slow
def test_a_search_looks_for_the_smallest_value(sweeps):
    arguments = _arguments(sweeps, "objective", 2, "sweep_direction=minimize")
    ended = sweeps.world.run(*arguments, code=0)
    assert sweeps.table["direction"] == "minimize"
    assert "sweep, the smallest result first:" in ended.stdout


def test_the_table_starts_with_the_best(sweeps):
    """It names the seeds that failed."""
    arguments = ["hydra/sweeper=robust_grid", "hydra.sweeper.repeat=3", "seed=1"]
    lr = "training.lr=1,3"
    ended = sweeps.sweep("saves_and_fails_at_2", lr, *arguments, n_jobs=None, code=1)
    trials = [line.split() for line in ended.stdout.splitlines() if " of 3" in line]
    assert [line[0] for line in trials] == ["1", "0"]
    shown = " ".join(trials[0][1:])
    assert shown == "4 ± 1.41 2 of 3 training.lr=3 without seed=2"

    def best(*words):
        return sweeps.world.robust_train("sweep", "best", *words, str(sweeps.folder)).stdout

    assert "training.lr=3 seed=3" in best()
    assert best("--checkpoint").strip() == str(sweeps.folder / "5" / "checkpoints" / "last")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["training.lr=interval(2,1)"], "training.lr=interval(2,1): `low <= high` must hold"),
        pytest.param(
            ["trainign.lr=interval(1,2)"],
            "no such key; did you mean training.lr?",
            marks=pytest.mark.slow,
        ),
        (["hydra.sweeper.sampler._target_=optuna.Nothing"], "hydra.sweeper: optuna.Nothing: "),
        pytest.param(
            ["hydra.sweeper.direction=up"],
            "direction=up: must be maximize or minimize",
            marks=pytest.mark.slow,
        ),
        (["hydra/launcher=joblib"], "hydra/launcher=joblib: this sweeper runs its jobs itself"),
        pytest.param(
            ["+hydra.sweeper.pruner._target_=optuna.pruners.Nothing"],
            "hydra.sweeper: optuna.pruners.Nothing: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_is_one_line(sweeps, given, line):
    sweeps.world.run(*_arguments(sweeps, "objective", 1, *given)).was_refused([line])
    assert not sweeps.ran


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"repeat": None}, "hydra.sweeper.repeat: None is not of type int"),
        ({"n_trials": "many"}, "hydra.sweeper.n_trials: 'many' is not of type int"),
        ({"pruner": "median"}, "hydra.sweeper.pruner: 'median' is not of type Mapping"),
        ({"n_jobs": 0}, "hydra.sweeper.n_jobs=0: must be 1 or more"),
        ({"pruner": {}, "repeat": 2}, "hydra.sweeper.repeat=2: a pruner needs repeat=1"),
        ({"study_name": "x"}, "hydra.sweeper.study_name: no such key"),
    ],
)
def test_an_unusable_setting_is_one_line(given, line):
    config = OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/launcher": "basic"}}}})
    with pytest.raises(ConfigError, match=line):
        sweep(None, None, config, given, [])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("x=interval(0.0,1.0)", "FloatDistribution(high=1.0, log=False, low=0.0, step=None)"),
        ("x=tag(log,interval(0.1,1))", "FloatDistribution(high=1.0, log=True, low=0.1, step=None)"),
        ("x=interval(1,8)", "FloatDistribution(high=8.0, log=False, low=1.0, step=None)"),
        ("x=int(interval(1,8))", "IntDistribution(high=8, log=False, low=1, step=1)"),
        ("x=tag(log,int(interval(1,8)))", "IntDistribution(high=8, log=True, low=1, step=1)"),
        ("x=range(1,10,3)", "IntDistribution(high=7, log=False, low=1, step=3)"),
        ("x=range(0.0,1.0,0.25)", "FloatDistribution(high=0.75, log=False, low=0.0, step=0.25)"),
        ("x=a,1,true", "CategoricalDistribution(choices=('a', 1, True))"),
        ("x=[1,2],null", "CategoricalDistribution(choices=('[1,2]', 'null'))"),
    ],
)
def test_the_search_space_has_hydras_syntax(override, expected):
    from robust_train.sweep.search import build_distribution

    parse = OverridesParser.create().parse_override
    assert str(build_distribution(parse(override))) == expected
    with pytest.raises(ConfigError, match="an interval has two ends"):
        build_distribution(parse("x=interval(1,inf)"))


def test_a_pruned_trial_leaves_a_checkpoint(sweeps):
    """The search has a best trial: a seed draws the values, and those after the first are worse."""
    pruner = ("hydra/sweeper/pruner=median", "hydra.sweeper.pruner.n_startup_trials=1")
    arguments = _arguments(sweeps, "reports_its_rate", 5, *pruner)
    sweeps.world.run(*arguments, code=0)
    trials = _study(sweeps)
    pruned = [trial.number for trial in trials if trial.state.name == "PRUNED"]
    assert pruned
    for number in pruned:
        state = json.loads((sweeps.folder / str(number) / "state.json").read_text())
        assert (state["state"], state["exit_code"]) == ("pruned", 0), number
        assert state["checkpoint_step"] < 40, number
        assert "(MedianPruner)" in sweeps.jobs[number]["reason"]
    assert trials[0].state.name == "COMPLETE"
    assert trials[0].intermediate_values[40] == trials[0].value
    again = sweeps.world.run(*arguments, code=0)
    assert sweeps.column("reused") == [True] * 5, "a pruned trial is over"
    assert " starts" not in again.output


def test_a_search_reports_changed_and_unreadable_files(tmp_path, caplog):
    """The files are in the folder of the search."""
    from robust_train.sweep.search import Search

    def begin(sweep, *fixed):
        table = SimpleNamespace(table=SweepTable(sweep, "gpu_queue"))
        queue = SimpleNamespace(folder=tmp_path, sweep=table)
        swept = {"x": OverridesParser.create().parse_override("x=interval(0,1)")}
        sampler = {"_target_": "optuna.samplers.RandomSampler", "seed": 1}
        return Search(queue, swept, list(fixed), [["seed=1"]], SweeperSettings(sampler=sampler))

    search = begin("first", "a=1", "b=2")
    number, overrides = search.take_next()
    row = SweepJob(number, tuple(overrides), "first", "completed", 0, result=0.5, trial=0)
    row.write(tmp_path / "0")
    search.record_end(row)
    begin("second", "b=2", "a=1", "resume=true")
    assert caplog.text == ""
    begin("third", "a=3", "b=2")
    assert "not all had the same overrides (a=1 a=3)" in caplog.text
    with (tmp_path / "study.jsonl").open("a") as file:
        file.write("garbage\n")
    with pytest.raises(ConfigError, match=r"study.jsonl: JSON.* move the file away"):
        begin("fourth", "a=1", "b=2")


@pytest.mark.parametrize(
    ("of_job", "others", "behind"),
    [
        ([1, 1, 1], [[2, 2, 2]], True),
        ([1, 1], [[2, 2]], False),
        ([1, 2, 1], [[2, 2, 2]], False),
        ([3, 0, 0], [[2, 2, 2]], False),
        ([1, 1, 1], [[2, 2]], False),
        ([1, 1, 1], [[2, 0, 0], [0, 2, 0], [0, 0, 2]], True),
        ([1, 1, 1], [], False),
    ],
)
@pytest.mark.parametrize(("sign", "mode"), [(1, "max"), (-1, "min")])
def test_who_is_out_of_patience(of_job, others, behind, sign, mode):
    reports = Reports(mode)
    for job, values in enumerate([of_job, *others]):
        reports.values[job] = {at: sign * value for at, value in enumerate(values)}
    assert reports.is_behind(0, 3) is behind


@pytest.mark.parametrize(
    ("mode", "seen"), [("max", {1: 0.9, 3: 0.7}), ("min", {2: 0.8, 3: 0.7}), ("", None)]
)
def test_figures_with_the_opposite_direction_are_omitted(tmp_path, caplog, mode, seen):
    journal = Journal(tmp_path / "journal.jsonl")
    for values in ((0.9, 1, "max"), (0.8, 2, "min"), (0.7, 3)):
        journal.write(ValueReported(*values))
    reports = Reports(mode)
    reports.begin(4, tmp_path)
    assert reports.values == {4: seen or {1: 0.9, 2: 0.8, 3: 0.7}}
    assert ("it is ignored" in caplog.text) is bool(mode)
