"""Hyper-parameters and results for TensorBoard's HPARAMS tab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tensorboard.plugins.hparams import api_pb2, metadata

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStatsKey, StatsContext, increment_log_step, log_stats
from maze.core.log_stats.log_stats_writer_tensorboard import flat_hyperparameters
from maze.utils.log_stats_utils import setup_logging
from maze.utils.tensorboard_reader import read_event_file, tensorboard_to_pandas

REWARD = LogStatsKey(BaseEnvEvents.reward, "mean", None)
CONFIG: dict[str, Any] = {
    "log_base_dir": "outputs",
    "env": {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env", "name": "CartPole-v1"},
    "algorithm": {"lr": 0.001, "n_epochs": 5, "schedule": None, "nested": {"on": True}, "betas": [0.9, 0.99]},
    "model": {"networks": [{"_target_": "a.b.Net", "hidden_units": [64, 64]}], "critic": "${critic}"},
    "critic": {"_target_": "a.b.Critic"},
    "runner": {"state_dict_dump_file": "state_dict.pt", "concurrency": 2},
    "wrappers": {"a.b.SomeWrapper": {"n": 3}},
}


def session_info(directory: Path, tag: str) -> Any:
    (file,) = directory.glob("events.out.tfevents.*")
    values = [value for event in read_event_file(file).events for value in event.summary.value if value.tag == tag]
    (value,) = values
    assert value.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME
    parse = {
        metadata.SESSION_START_INFO_TAG: metadata.parse_session_start_info_plugin_data,
        metadata.SESSION_END_INFO_TAG: metadata.parse_session_end_info_plugin_data,
    }
    return parse[tag](value.metadata.plugin_data.content)


def test_values_are_flat_and_readable() -> None:
    plain = OmegaConf.to_container(OmegaConf.create(CONFIG), resolve=True)
    assert isinstance(plain, dict)
    assert flat_hyperparameters({str(key): value for key, value in plain.items()}) == {
        "algorithm.lr": 0.001,
        "algorithm.n_epochs": 5,
        "algorithm.nested.on": True,
        "algorithm.betas": "[0.9, 0.99]",
        "env": "make_gym_maze_env",
        "env.name": "CartPole-v1",
        "model.networks.0": "Net",
        "model.networks.0.hidden_units": "[64, 64]",
        "model.critic": "Critic",
        "runner.concurrency": 2,
        "wrappers.SomeWrapper.n": 3,
    }


def test_the_hyperparameter_tab_holds_the_settings_and_the_reward_of_a_run(tmp_path: Path) -> None:
    with StatsContext():
        setup_logging(OmegaConf.create(CONFIG), log_dir=tmp_path)
        log_stats({REWARD: 1.0}, "train")  # before the first evaluation
        increment_log_step()
        for reward in (5.0, 7.0, float("nan"), 6.0):
            log_stats({REWARD: 100.0}, "train")
            log_stats({REWARD: reward}, "eval")
            increment_log_step()
    start = session_info(tmp_path, metadata.SESSION_START_INFO_TAG)
    assert start.hparams["algorithm.lr"].number_value == 0.001
    assert start.hparams["algorithm.nested.on"].bool_value is True
    assert start.hparams["model.critic"].string_value == "Critic"
    assert session_info(tmp_path, metadata.SESSION_END_INFO_TAG).status == api_pb2.STATUS_SUCCESS
    table = tensorboard_to_pandas(tmp_path)
    assert table.loc["Results/final_reward"].value.tolist() == [1.0, 5.0, 7.0, 6.0]
    assert table.loc["Results/best_reward"].value.tolist() == [1.0, 5.0, 7.0, 7.0]


def test_a_failed_run_is_marked_as_failed(tmp_path: Path) -> None:
    def train() -> None:
        with StatsContext():
            setup_logging(CONFIG, log_dir=tmp_path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert session_info(tmp_path, metadata.SESSION_END_INFO_TAG).status == api_pb2.STATUS_FAILURE


def test_a_run_in_the_handler_of_another_error_is_not_marked_as_failed(tmp_path: Path) -> None:
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        with StatsContext():
            setup_logging(CONFIG, log_dir=tmp_path)
    assert session_info(tmp_path, metadata.SESSION_END_INFO_TAG).status == api_pb2.STATUS_SUCCESS


@pytest.mark.parametrize("config", [None, "just: text", {"env": {"name": "CartPole-v1"}}])
def test_rollout_jobs_are_not_in_the_hparams_tab(config: Any, tmp_path: Path) -> None:
    with StatsContext():
        setup_logging(config, log_dir=tmp_path)
        log_stats({REWARD: 1.0}, "eval")
        increment_log_step()
    (file,) = tmp_path.glob("events.out.tfevents.*")
    tags = {value.tag for event in read_event_file(file).events for value in event.summary.value}
    assert not any(tag.startswith(("_hparams_", "Results")) for tag in tags)


def test_values_that_only_the_command_line_can_resolve_are_shown_as_they_are(tmp_path: Path) -> None:
    with StatsContext():
        setup_logging("algorithm: {lr: 0.1}\nenv: {name: '${hydra:job.name}'}", log_dir=tmp_path)
    start = session_info(tmp_path, metadata.SESSION_START_INFO_TAG)
    assert start.hparams["algorithm.lr"].number_value == 0.1
