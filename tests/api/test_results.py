"""Results of training runs and evaluations, and the recorded state of a training run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.api.run_context import RunContext
from maze.api.training_run import Evaluation
from maze.api.utils import InvalidSpecificationError
from maze.core.agent.policy import Policy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsKey
from maze.train.trainers.common import trainer
from maze.train.utils.run_process import RECORD_FILE, read_record, write_record
from tests.api.shorter import SEEDS, SHORTER

STEPS_PER_EPOCH = 8  # SHORTER: one update of 4 steps in each of 2 environments


def context(algorithm: str = "a2c", silent: bool = True, **overrides: Any) -> RunContext:
    values = {**SHORTER[algorithm], **SEEDS, "env.name": "CartPole-v1", **overrides}
    return RunContext(algorithm=algorithm, overrides=values, silent=silent)


def test_steps_are_rounded_up_to_whole_updates() -> None:
    rc = context()
    result = rc.train(n_steps=2 * STEPS_PER_EPOCH + 1)
    assert list(result.history.index) == [1, 2, 3]
    assert list(result.history["n_steps"]) == [8, 16, 24]
    assert rc.train(n_steps=8).history["n_steps"].iloc[-1] == 32  # a further call trains on


def test_epochs_become_shorter_where_fewer_steps_are_wanted() -> None:
    rc = context(**{"algorithm.epoch_length": 5000})
    per_update = STEPS_PER_EPOCH
    assert rc.train(n_steps=3 * per_update).history["n_steps"].tolist() == [3 * per_update]
    assert rc.train(n_steps=7 * per_update).history["n_steps"].iloc[-1] == (3 + 7) * per_update


def test_shorter_epochs_are_those_of_one_call() -> None:
    rc = context(**{"algorithm.epoch_length": 2})
    rc.train(n_steps=STEPS_PER_EPOCH)
    assert rc.train(n_epochs=2).history["n_steps"].tolist() == [STEPS_PER_EPOCH * n for n in (1, 3, 5)]


def test_the_random_steps_that_fill_a_replay_buffer_count_as_environment_steps() -> None:
    history = context("sac", **{"algorithm.initial_buffer_size": 50}).train(n_epochs=2).history
    per_epoch = history["n_steps"].iloc[1] - history["n_steps"].iloc[0]
    assert history["n_steps"].iloc[0] == 50 + per_epoch


def test_a_run_without_a_number_of_epochs_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "EPOCH_LIMIT", 3)
    assert len(context(**{"algorithm.patience": 0}).train(n_epochs=0).history) == 3


@pytest.mark.parametrize(
    ("algorithm", "arguments", "said"),
    [
        ("a2c", {"n_step": 10}, "n_step: unknown argument. Did you mean `n_steps`"),
        ("a2c", {"train_kwargs": {}}, "train_kwargs: unknown argument. Known: n_steps, n_epochs."),
        ("a2c", {"n_steps": 0}, "n_steps: expected a whole number of at least 1"),
        ("a2c", {"n_steps": 8, "n_epochs": 1}, "either n_epochs or n_steps"),
        ("es", {"n_steps": 100}, "n_steps: ESTrainer has no fixed number.*n_epochs instead"),
    ],
)
def test_arguments_of_train_that_cannot_be_meant_are_refused(
    algorithm: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        context(algorithm).train(**arguments)


def test_training_returns_score_directory_and_history() -> None:
    rc = context(**{"algorithm.n_rollout_steps": 100})
    result = rc.train(n_epochs=2)
    assert (result.path / "state_dict.pt").is_file()
    assert result.best_score == rc.results.best_score > 0
    assert list(result.history.columns) == ["n_steps", "mean_reward"]
    assert result.history["mean_reward"].between(8, 200).all()  # CartPole: random play lasts about 20 steps


def test_the_history_of_evolution_strategies_counts_the_steps_that_were_taken() -> None:
    history = context("es").train(n_epochs=2).history
    assert history["n_steps"].is_monotonic_increasing
    assert (history["mean_reward"] > 0).all()
    # CartPole rewards every step with 1, and an update has at least two episodes
    assert history["n_steps"].iloc[0] >= 2 * history["mean_reward"].iloc[0]


def test_an_evaluation_is_readable_and_still_the_documented_mapping() -> None:
    rc = context()
    rc.train(n_epochs=1)
    evaluation = rc.evaluate(n_episodes=2)
    mean = evaluation[LogStatsKey(BaseEnvEvents.reward, "mean", None)]
    assert isinstance(evaluation, dict)
    assert evaluation.mean_reward == mean == evaluation.to_frame().loc[("BaseEnvEvents", "reward", "mean"), "value"]
    assert evaluation.kpis == {}
    assert repr(evaluation) == f"Evaluation(mean_reward={mean:.5g})"


def test_kpis_of_an_evaluation_have_their_names() -> None:
    kpi = LogStatsKey(BaseEnvEvents.kpi, "mean", ("waste",))
    reward = LogStatsKey(BaseEnvEvents.reward, "mean", None)
    evaluation = Evaluation({reward: 2.0, kpi: 0.25, kpi._replace(output_name="std"): 0.1})
    assert evaluation.kpis == {"waste": 0.25}
    assert repr(evaluation) == "Evaluation(mean_reward=2, waste=0.25)"


# -- run.json --------------------------------------------------------------------------------------------------


def test_a_training_run_records_its_progress() -> None:
    rc = context()
    result = rc.train(n_epochs=2)
    record = read_record(result.path)
    assert record is not None
    assert (record["state"], record["epoch"], record["n_env_steps"]) == ("ended", 2, 16)
    assert record["best_score"] == result.best_score


def test_a_resumed_run_continues_to_count_steps() -> None:
    first = context().train(n_epochs=2)
    resumed = context(input_dir=str(first.path), resume=True).train(n_epochs=3)
    assert read_record(resumed.path)["n_env_steps"] == 24


def test_a_failed_run_is_recorded_as_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    rc = context()
    rc.train(n_epochs=1)
    monkeypatch.setattr(rc.runner.trainer, "_update", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rc.train(n_epochs=1)
    assert read_record(Path(rc.run_dir))["state"] == "interrupted"


def test_a_killed_run_is_recorded_as_interrupted(tmp_path: Path) -> None:
    write_record(tmp_path, "running", {"epoch": 3})
    assert read_record(tmp_path)["state"] == "running"
    record = json.loads((tmp_path / RECORD_FILE).read_text(encoding="utf-8"))
    (tmp_path / RECORD_FILE).write_text(json.dumps({**record, "process": 2**22 + 1}), encoding="utf-8")
    assert read_record(tmp_path) == {**record, "process": 2**22 + 1, "state": "interrupted"}


def test_a_damaged_run_record_is_read_as_absent(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text('{"state": "run', encoding="utf-8")
    assert read_record(tmp_path) is None


# -- console output --------------------------------------------------------------------------------------------


def test_a_run_without_a_number_of_epochs_prints_its_end_condition(capsys: pytest.CaptureFixture[str]) -> None:
    context(silent=False, **{"algorithm.patience": 1, "algorithm.lr": 0.0}).train(n_epochs=0)
    said = capsys.readouterr().out
    assert "algorithm.n_epochs is 0: early stopping ends the run, or epoch 1,000" in said


def test_the_mean_reward_of_an_epoch_in_which_no_episode_ends_is_nan() -> None:
    history = context(**{"env.name": "Pendulum-v1"}).train(n_epochs=2).history  # episodes of 200 steps
    assert all(math.isnan(reward) for reward in history["mean_reward"])


def test_an_evaluation_prints_its_kind_of_actions_and_a_rollout_the_number_of_truncated_episodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rc = context(silent=False)
    rc.train(n_epochs=1)
    capsys.readouterr()
    rc.evaluate(n_episodes=1, deterministic=False)
    assert capsys.readouterr().out.startswith("Evaluating with sampled actions")
    table = rc.rollout(n_episodes=2, max_episode_steps=3, record_trajectory=False, record_event_logs=False)
    assert table.attrs["n_cut_off"] == 2
    assert "Rolling out with sampled actions" in capsys.readouterr().out


class PushesLeft(Policy):
    """A policy with improbable random actions."""

    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: Any = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        return {"action": np.int64(0)}


def test_the_environment_is_the_first_argument_of_run_context() -> None:
    rc = RunContext("CartPole-v1", algorithm="a2c", overrides={**SHORTER["a2c"], **SEEDS}, silent=True)
    assert rc.train(n_steps=STEPS_PER_EPOCH).history["n_steps"].tolist() == [STEPS_PER_EPOCH]
    assert rc.env_factory().core_env.env.spec.id == "CartPole-v1"


def test_other_policies_are_evaluated_and_rolled_out_before_any_training() -> None:
    rc = context()
    evaluation = rc.evaluate(n_episodes=3, policy=PushesLeft())
    assert 8 <= evaluation.mean_reward <= 11  # the pole falls in about nine steps
    assert rc.evaluate(3, policy=PushesLeft()) == evaluation
    frame = rc.rollout(2, policy=PushesLeft(), max_episode_steps=50)
    assert 8 <= frame.loc[("BaseEnvEvents", "reward", "mean"), "value"] <= 11
    assert rc.train(n_epochs=1).history.index.tolist() == [1]  # training is still possible


def test_policies_are_compared_in_the_same_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    rc = context(silent=False)
    result = rc.train(n_epochs=1)
    capsys.readouterr()
    comparison = rc.compare({"left": PushesLeft()}, n_episodes=5)
    assert comparison.text() in capsys.readouterr().out
    assert [row.policy for row in comparison.rows_of("return")] == ["left", "random", "trained"]
    assert 8 <= comparison.rows_of("return")[0].mean.value <= 11
    assert {path.name for path in (result.path / "comparison").iterdir()} == {
        *("report.html", "comparison.csv", "episodes.csv")
    }
    assert rc.compare({"left": PushesLeft()}, n_episodes=5).table == comparison.table  # random decisions are seeded
    for wrong in ({"trained": PushesLeft()}, [PushesLeft()]):
        with pytest.raises(InvalidSpecificationError, match="by names other than random and trained, found"):
            rc.compare(wrong)
