"""Choosing the best model by any statistic or KPI, subject to constraints."""

import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_events.monitoring_events import DiscreteActionEvents
from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_stats_grouping,
    define_step_stats,
)
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.utils.checkpoint import load_state
from maze.maze_cli import main
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection, best_score
from maze.train.trainers.common.model_selection.model_selection_base import (
    ModelSelectionBase,
    SelectionCriterion,
    find_statistic,
    tell,
)
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig


class CuttingEvents:
    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_cut(self):
        """A cut that is not possible."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def valid_cut(self):
        """A cut that is possible."""

    @define_epoch_stats(sum)
    @define_episode_stats(sum)
    @define_step_stats(len)
    @define_stats_grouping("machine")
    def machine_stopped(self, machine):
        """A machine that stands still."""

    @define_epoch_stats(np.mean, input_name="mean", output_name="step_mean")
    @define_epoch_stats(max, input_name="max", output_name="step_max")
    @define_episode_stats(np.mean, output_name="mean")
    @define_episode_stats(max, output_name="max")
    @define_step_stats(None)
    def stock(self, value):
        """Pieces in stock."""


class OtherEvents:
    @define_epoch_stats(sum)
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_cut(self):
        """The same name in another interface."""


def stats(reward=3.0, **kpis):
    return {
        LogStatsKey(BaseEnvEvents.reward, "mean", None): reward,
        LogStatsKey(BaseEnvEvents.reward, "max", None): reward + 1,
        LogStatsKey(DiscreteActionEvents.action, None, ("substep_0", "action")): ([0, 1, 1], 2),
        **{LogStatsKey(BaseEnvEvents.kpi, "mean", (name,)): value for name, value in kpis.items()},
        **{LogStatsKey(BaseEnvEvents.kpi, "max", (name,)): value + 10 for name, value in kpis.items()},
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eval_BaseEnvEvents/kpi/mean/raw_pieces", 7.0),  # as TensorBoard shows it
        ("eval BaseEnvEvents kpi mean raw_pieces", 7.0),  # as the console shows it
        ("BaseEnvEvents/kpi/mean/raw_pieces", 7.0),
        ("kpi/raw_pieces", 7.0),
        ("kpi/max/raw_pieces", 17.0),
        ("reward", 3.0),
        ("reward/max", 4.0),
        ("BaseEnvEvents.reward", 3.0),
        ("invalid_cut", 2.0),  # its only statistic
        ("invalid_cut/mean_episode_total", 2.0),
        ("stock/step_max", 9.0),
        ("kpi/waste", None),
        ("action", None),  # a distribution is not a number
    ],
)
def test_statistics_are_found_by_their_names_in_the_logs_and_by_short_ones(name, value):
    logged = stats(raw_pieces=7.0)
    logged[LogStatsKey(CuttingEvents.invalid_cut, "mean_episode_total", None)] = 2.0
    logged[LogStatsKey(CuttingEvents.stock, "step_mean", None)] = 5.0
    logged[LogStatsKey(CuttingEvents.stock, "step_max", None)] = 9.0
    assert find_statistic(logged, name) == value


def test_a_name_that_may_mean_several_statistics_is_refused():
    logged = {
        LogStatsKey(CuttingEvents.stock, "step_mean", None): 5.0,
        LogStatsKey(CuttingEvents.stock, "step_max", None): 9.0,
    }
    with pytest.raises(ConfigError, match="CuttingEvents/stock/step_mean, CuttingEvents/stock/step_max"):
        find_statistic(logged, "stock")
    logged = {LogStatsKey(event.invalid_cut, None, None): 1.0 for event in (CuttingEvents, OtherEvents)}
    with pytest.raises(ConfigError, match="CuttingEvents/invalid_cut, OtherEvents/invalid_cut"):
        find_statistic(logged, "invalid_cut")
    assert find_statistic(logged, "OtherEvents/invalid_cut") == 1.0


def test_by_default_the_mean_reward_counts():
    assert SelectionCriterion().judge(stats(reward=-2.5)) == (-2.5, 0.0)


def test_an_objective_to_be_minimised_scores_the_higher_the_smaller_it_is():
    criterion = SelectionCriterion("kpi/waste", maximize=False)
    assert criterion.judge(stats(waste=0.25)) == (-0.25, 0.0)


@pytest.mark.parametrize(
    ("constraint", "value", "violation"),
    [
        ("kpi/waste <= 0.5", 0.5, 0.0),
        ("kpi/waste < 0.5", 0.5, 1e-9),
        ("kpi/waste<=0.5", 0.75, 0.25),
        ("kpi/waste >= 20", 15.0, 0.25),  # relative to large bounds
        ("kpi/waste == 1", 1.0, 0.0),
        ("kpi/waste <= 0.5", math.nan, math.inf),
    ],
)
def test_violations_of_constraints(constraint, value, violation):
    criterion = SelectionCriterion(constraints=[constraint])
    assert criterion.judge(stats(waste=value)).violation == pytest.approx(violation)


@pytest.mark.parametrize("text", ["kpi/waste", "kpi/waste =< 1", "<= 3", "kpi/waste <= much", "kpi/waste <= nan", 3])
def test_constraints_that_cannot_be_read_are_refused_when_they_are_given(text):
    with pytest.raises(ConfigError, match="constraints"):
        RolloutEvaluator(None, 1, None, constraints=[text])


def test_settings_of_wrong_types_are_refused():
    with pytest.raises(ConfigError, match="expected a list such as"):
        SelectionCriterion(constraints="kpi/waste <= 1")
    with pytest.raises(ConfigError, match="maximize"):
        SelectionCriterion(maximize="no")
    with pytest.raises(ConfigError, match="constraints"):
        ESAlgorithmConfig(n_epochs=1, constraints=["?"])


def test_a_misspelt_objective_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match=r"kpi/raw_peices.*Known: .*BaseEnvEvents/kpi/mean/raw_pieces"):
        SelectionCriterion("kpi/raw_peices").judge(stats(raw_pieces=1.0))


def cutting_stats():
    """Of an evaluation in which only possible cuts were made, and machine 1 stood still."""
    return {
        **stats(waste=1.0),
        LogStatsKey(CuttingEvents.valid_cut, "mean_episode_total", None): 3.0,
        LogStatsKey(CuttingEvents.machine_stopped, None, (1,)): 3.0,
    }


@pytest.mark.parametrize(
    "name",
    [
        "invalid_cut",
        "CuttingEvents/invalid_cut",
        "eval_CuttingEvents/invalid_cut/mean_episode_total",
        "machine_stopped/2",
        "stock/step_max",
    ],
)
@pytest.mark.parametrize("logged", [stats(), cutting_stats()], ids=["alone", "beside a similar one"])
def test_an_event_that_does_not_occur_counts_as_zero(name, logged, caplog):
    criterion = SelectionCriterion(constraints=[f"{name} <= 0", f"{name} >= 1"])
    for _ in range(2):
        assert criterion.judge(logged).violation == 1.0
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once for each name"
    assert f"no statistic or KPI '{name}'" in caplog.text
    assert "Known: BaseEnvEvents/" in caplog.text


@pytest.mark.parametrize("name", ["kpi/wast", "wast", "invalid_cutt", "CuttingEvents/invalid_cutt"])
def test_a_name_of_neither_kpi_nor_event_is_refused_at_the_first_evaluation(name):
    with pytest.raises(ConfigError, match=r"Known: .*BaseEnvEvents/kpi/mean/waste"):
        SelectionCriterion(constraints=[f"{name} <= 0"]).judge(cutting_stats())


def test_a_kpi_may_be_missing_in_later_evaluations():
    criterion = SelectionCriterion(constraints=["kpi/waste <= 0"])
    assert criterion.judge(stats(waste=1.0)).violation == 1.0
    assert criterion.judge(stats()).violation == 0.0


def test_the_best_model_fulfils_the_constraints_as_soon_as_one_does(capsys):
    selection = BestModelSelection(None, None)
    criterion = SelectionCriterion("kpi/raw_pieces", False, ["kpi/invalid <= 0"])
    history = []
    for raw_pieces, invalid in [(5.0, 2.0), (9.0, 1.0), (3.0, 2.0), (20.0, 0.0), (4.0, 1.0), (18.0, 0.0), (19.0, 0.0)]:
        tell(selection, criterion, stats(raw_pieces=raw_pieces, invalid=invalid))
        history.append((selection.best_reward, selection.best_violation, selection.last_improvement))
    assert history == [
        (-5.0, 2.0, 0),
        (-9.0, 1.0, 0),  # nearer to fulfilling them
        (-9.0, 1.0, 1),
        (-20.0, 0.0, 0),
        (-20.0, 0.0, 1),  # better, but broken
        (-18.0, 0.0, 0),
        (-18.0, 0.0, 1),
    ]
    output = capsys.readouterr().out
    assert "new overall best model 5.00000! (constraints are violated by 2)" in output, (
        "KPIs are shown as they are logged"
    )


@given(
    st.lists(
        st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 0.5, 2.0, math.inf, math.nan])),
        max_size=12,
    )
)
def test_the_best_score_is_finite_and_no_other_satisfies_more_constraints(evaluations):
    selection = BestModelSelection(None, None)
    for reward, violation in evaluations:
        selection.update_constrained(reward, violation)
    valid = [(-violation, reward) for reward, violation in evaluations if math.isfinite(violation + reward)]
    if valid:
        assert (-selection.best_violation, selection.best_reward) == max(valid)
    else:
        assert selection.best_reward == -math.inf
    assert selection.n_updates == len(evaluations)


def test_score_of_a_run_is_the_logged_kpi_with_violated_constraints():
    selection = BestModelSelection(None, None)
    runner = SimpleNamespace(trainer=SimpleNamespace(model_selection=selection))
    assert best_score(runner) is None
    assert best_score(SimpleNamespace()) is None
    tell(selection, SelectionCriterion("kpi/waste", maximize=False), stats(waste=0.25))
    score = best_score(runner)
    assert (score, score.violation, score.maximize) == (0.25, None, False)
    continued = BestModelSelection(None, None)
    continued.load_state_dict(selection.state_dict())
    score = best_score(SimpleNamespace(trainer=SimpleNamespace(model_selection=continued)))
    assert (score, score.violation, score.maximize) == (0.25, None, False)
    selection = runner.trainer.model_selection = BestModelSelection(None, None)
    tell(selection, SelectionCriterion(constraints=["kpi/waste <= 0"]), stats(reward=4.0, waste=0.5))
    score = pickle.loads(pickle.dumps(best_score(runner)))  # as it comes from a process of a sweep
    assert (score, score.violation, score.maximize) == (4.0, 0.5, True)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_never_the_best_and_warned_about(reward, caplog):
    selection = BestModelSelection(None, None)
    selection.update(reward)
    assert selection.best_reward == -math.inf
    assert "not considered" in caplog.text


def test_a_selection_with_constraints_continues_from_its_state():
    selection = BestModelSelection(None, None)
    selection.update_constrained(4.0, 1.0)
    state = selection.state_dict()
    continued = BestModelSelection(None, None)
    continued.load_state_dict(state)
    continued.update_constrained(9.0, 2.0)
    assert (continued.best_reward, continued.best_violation) == (4.0, 1.0)


def test_a_selection_without_constraints_receives_no_scores_that_violate_one():
    scores = []

    class Recording(ModelSelectionBase):
        def update(self, reward):
            scores.append(reward)

    criterion = SelectionCriterion(constraints=["kpi/waste <= 0"])
    for waste in (0.0, 1.0):
        tell(Recording(), criterion, stats(waste=waste))
    assert scores == [3.0, -math.inf]


def test_the_configuration_of_an_evaluator_takes_the_criterion():
    config = A2CAlgorithmConfig()
    evaluator = RolloutEvaluator(None, 1, None, objective="kpi/waste", maximize=False, constraints=["reward >= 0"])
    assert evaluator.criterion.judge(stats(reward=1.0, waste=0.5)) == (-0.5, 0.0)
    assert "objective" not in config.rollout_evaluator  # evaluators without the setting are left alone


@pytest.mark.parametrize(
    "settings",
    [
        (
            *("algorithm=es", "algorithm.n_epochs=2", "algorithm.n_rollouts_per_update=2", "algorithm.max_steps=20"),
            *("runner.n_eval_rollouts=2", "runner.shared_noise_table_size=1000000", "algorithm.objective=reward/min"),
            'algorithm.constraints=["reward/mean_step_count >= 1000"]',
        ),
        (
            *("algorithm=a2c", "algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4"),
            *("runner.concurrency=2", "+algorithm.rollout_evaluator.objective=reward/min"),
            '+algorithm.rollout_evaluator.constraints=["reward/mean_step_count >= 1000"]',
        ),
    ],
    ids=["es", "a2c"],
)
def test_runs_from_the_command_line_select_by_the_criterion(settings, tmp_path, capfd):
    directory = tmp_path / "run"
    assert (
        main(["-cn", "conf_train", "env.name=CartPole-v1", "verbose=2", *settings, f"hydra.run.dir={directory}"]) == 0
    )
    selection = load_state(directory / "latest.pt")["model_selection"]
    output = capfd.readouterr().out
    assert 0.5 <= selection["best_violation"] < 1.0, "CartPole-v1 ends after 500 steps"
    assert f"new overall best model {selection['best_reward']:.5f}! (constraints are violated by" in output
    assert selection["best_reward"] == int(selection["best_reward"]), "the return of one episode"
