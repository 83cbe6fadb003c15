"""RunContext: resuming, several runs, overrides, rollouts."""

from __future__ import annotations

import random
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from maze.api.run_context import RunContext
from maze.api.utils import RunContextError, RunMode
from maze.cli.run_summary import run_commands
from maze.core.agent.dummy_cartpole_policy import DummyCartPolePolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsKey, StatsContext
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.utils.checkpoint import load_state
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.distributions.distribution_mapper import DistributionMapper
from maze.maze_cli import main
from maze.perception.models.critics.shared_state_critic_composer import SharedStateCriticComposer
from maze.perception.models.custom_model_composer import CustomModelComposer
from maze.perception.models.policies import ProbabilisticPolicyComposer
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
from tests.api.shorter import SEEDS, SHORTER

CARTPOLE = {"env.name": "CartPole-v1"}
NET = "maze.perception.models.built_in.flatten_concat.FlattenConcatPolicyNet"
VALUE_NET = "maze.perception.models.built_in.flatten_concat.FlattenConcatStateValueNet"


def cartpole() -> GymMazeEnv:
    return GymMazeEnv("CartPole-v1")


def context(algorithm: Any = "a2c", overrides: dict[str, Any] | None = None, **arguments: Any) -> RunContext:
    name = algorithm if isinstance(algorithm, str) else "a2c"
    own_env = {} if "env" in arguments else CARTPOLE
    values = {**SHORTER[name], **own_env, **SEEDS, **(overrides or {})}
    return RunContext(algorithm=algorithm, overrides=values, silent=arguments.pop("silent", True), **arguments)


def trained(*arguments: Any, **further: Any) -> RunContext:
    rc = context(*arguments, **further)
    rc.train(n_epochs=1)
    return rc


def weights(run: Any) -> dict[str, Any]:
    """The best weights and the last ones that a run has written."""
    directory = Path(run.run_dir if isinstance(run, RunContext) else run)
    best, latest = (load_state(directory / name) for name in ("state_dict.pt", "latest.pt"))
    return {"best": best, "latest": latest["model"]}


def flat(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for value in state.values() for tensor in flat(value)] if isinstance(state, dict) else []


def assert_same_weights(one: Any, other: Any) -> None:
    pairs = list(zip(flat(one), flat(other), strict=True))
    assert pairs
    assert all(torch.equal(left, right) for left, right in pairs)


# -- reproducibility and isolation ---------------------------------------------------------------------------


def test_the_same_seeds_give_the_same_weights_as_another_run_context_and_as_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = trained(), trained()
    overrides = {**SHORTER["a2c"], **CARTPOLE, **SEEDS}
    command = ["-cn", "conf_train", "algorithm=a2c", *(f"{key}={value}" for key, value in overrides.items())]
    directory = tmp_path / "by_command"
    assert main([*command, "algorithm.n_epochs=1", f"hydra.run.dir={directory}"]) == 0
    capfd.readouterr()
    assert_same_weights(weights(first), weights(second))
    assert_same_weights(weights(first), weights(directory))
    assert Path(first.run_dir).parent.name == "gym_env-flatten_concat-a2c-flatten_concat_shared-dev"


def cart_position(env: Any) -> Any:
    return (env.core_env.env if isinstance(env, GymMazeEnv) else env).unwrapped.state


@pytest.mark.parametrize("make", [cartpole, lambda: gymnasium.make("CartPole-v1")], ids=["Maze", "gymnasium"])
def test_an_environment_instance_is_copied_before_it_is_stepped(make: Callable[[], Any]) -> None:
    env = make()
    before = cart_position(env)
    assert_same_weights(weights(trained(env=env)), weights(trained(env=make)))
    assert cart_position(env) is before  # neither reset nor stepped


def test_an_environment_that_cannot_be_copied_must_be_given_as_a_function() -> None:
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.connection = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"env: .* this TimeLimit cannot be copied.*lock.*env=lambda"):
        trained(env=env)


def test_the_command_that_is_written_down_repeats_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    rc = trained(model="vector_obs", critic="template_state", overrides={"algorithm.n_epochs": 1})
    command = shlex.split(Path(rc.run_dir, "command.txt").read_text(encoding="utf-8"))
    assert command[0] == "maze-run"
    assert main([*command[1:], "hydra.run.dir=again"]) == 0
    capfd.readouterr()
    assert_same_weights(weights(rc), weights("again"))


def test_run_contexts_that_take_turns_do_not_disturb_each_other() -> None:
    alone = context()
    alone.train(n_epochs=1)
    alone.train(n_epochs=1)
    one, other = context(), context(overrides={"seeding.agent_base_seed": 99})
    one.train(n_epochs=1)
    other.train(n_epochs=1)
    one.evaluate(n_episodes=1)
    torch.rand(7)
    one.train(n_epochs=1)
    assert_same_weights(alone.runner.trainer.state_dict(), one.runner.trainer.state_dict())


@pytest.mark.parametrize(
    "call",
    [
        lambda rc: rc.train(n_epochs=1),
        lambda rc: rc.evaluate(n_episodes=1),
        lambda rc: rc.rollout(n_episodes=1, max_episode_steps=5),
        lambda rc: rc.compute_action(rc.env_factory().reset()),
        lambda rc: _train_with_unknown_argument(rc),  # noqa: PLW0108 (defined below)
    ],
    ids=["train", "evaluate", "rollout", "compute_action", "failing train"],
)
def test_a_call_leaves_the_process_as_it_was(call: Callable[[RunContext], Any]) -> None:
    rc = trained()
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 (the global generator is what is tested)
    torch.manual_seed(3)
    before = _state_of_process()
    call(rc)
    assert _state_of_process() == before


def _train_with_unknown_argument(rc: RunContext) -> None:
    with pytest.raises(RunContextError):
        rc.train(n_epochs=1, unknown=2)


def _state_of_process() -> list[Any]:
    return [
        Path.cwd(),
        GlobalHydra.instance().is_initialized(),
        HydraConfig.instance().cfg,
        StatsContext.active().writers[:],
        StatsContext.active().step,
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]  # noqa: NPY002
        torch.get_rng_state().tolist(),
    ]


def test_every_table_is_printed_once_for_any_number_of_run_contexts(capfd: pytest.CaptureFixture[str]) -> None:
    others = [trained(), trained()]
    capfd.readouterr()
    rc = trained(silent=False, overrides={"verbose": 2})
    printed = capfd.readouterr().out
    assert printed.count("train                 ActorCriticEvents     learning_rate") == 1
    others[0].train(n_epochs=1)
    assert capfd.readouterr().out == ""
    rc.evaluate(n_episodes=1)
    assert capfd.readouterr().out.count("total_episode_count") == 1


def test_verbosity_0_suppresses_everything_but_errors(capfd: pytest.CaptureFixture[str]) -> None:
    rc = trained()
    rc.evaluate(n_episodes=1)
    rc.rollout(n_episodes=1, max_episode_steps=5)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError):
        rc.train(n_epochs=-1)


# -- resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "es", "impala"])
def test_a_second_call_trains_on(algorithm: str) -> None:
    rc = trained(algorithm)
    rc.train(n_epochs=2)
    assert rc.runner.trainer.epoch == 3


def test_a_run_directory_that_holds_a_run_is_continued_in_place() -> None:
    first = trained(run_dir="mine")
    second = context(run_dir="mine")
    assert_same_weights(second.policy.state_dict(), {"policies": weights(first)["best"]["policies"]})
    second.train(n_epochs=1)
    assert first.run_dir == second.run_dir == str(Path("mine").absolute())


def test_resuming_in_a_run_directory_equals_an_uninterrupted_run() -> None:
    trained(run_dir="broken_off")
    resumed = context(run_dir="broken_off", overrides={"resume": True})
    resumed.train(n_epochs=2)
    whole = context()
    whole.train(n_epochs=2)
    assert_same_weights(resumed.runner.trainer.state_dict(), whole.runner.trainer.state_dict())


def test_input_dir_among_the_overrides_starts_a_new_run_from_an_earlier_one() -> None:
    first = trained()
    second = context("ppo", overrides={"input_dir": first.run_dir})
    assert second.evaluate(n_episodes=1)
    second.train(n_epochs=1)
    assert second.run_dir != first.run_dir


def test_a_failed_run_is_not_continued_silently() -> None:
    calls = 0

    def failing() -> GymMazeEnv:
        env = cartpole()
        step = env.step

        def failing_step(action: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 50:
                raise RuntimeError("the simulator is gone")
            return step(action)

        env.step = failing_step  # type: ignore[method-assign]
        return env

    rc = context(env=failing, overrides={"algorithm.epoch_length": 20})
    with pytest.raises(Exception, match="the simulator is gone"):
        rc.train(n_epochs=1)
    assert rc.results.status == "failed"
    with pytest.raises(RunContextError, match=r"has failed: .*run_dir="):
        rc.train(n_epochs=1)


def test_a_closed_run_context_keeps_its_policy_and_trains_no_more() -> None:
    with trained() as rc:
        observation = rc.env_factory().reset()
    assert rc.compute_action(observation)["action"] in (0, 1)
    with pytest.raises(RunContextError, match=r"is closed.*run_dir="):
        rc.train(n_epochs=1)
    untrained = context()
    untrained.close()
    with pytest.raises(RunContextError, match=r"is closed\.$"):
        untrained.train(n_epochs=1)


def test_errors_of_the_caller_are_not_those_of_the_run() -> None:
    try:
        raise ValueError("of an earlier attempt")
    except ValueError:
        rc = trained()
        rc.close()
    report = (rc.results.path / "report.html").read_text(encoding="utf-8")
    assert 'state ended">' in report
    assert "earlier attempt" not in report


# -- objects ---------------------------------------------------------------------------------------------------


def composers() -> dict[str, Any]:
    env = cartpole()
    spaces = {"observation_spaces_dict": env.observation_spaces_dict, "agent_counts_dict": {0: 1}}
    policy = ProbabilisticPolicyComposer(
        action_spaces_dict=env.action_spaces_dict,
        distribution_mapper=DistributionMapper(env.action_space, {}),
        networks=[{"_target_": NET, "non_lin": "torch.nn.Tanh", "hidden_units": [5]}],
        substeps_with_separate_agent_nets=[],
        **spaces,
    )
    networks = [{"_target_": VALUE_NET, "non_lin": "torch.nn.Tanh", "hidden_units": [6]}]
    critic = SharedStateCriticComposer(networks=networks, stack_observations=False, **spaces)
    return {"policy": policy, "critic": critic}


def test_the_configuration_of_objects_can_be_read_afterwards() -> None:
    algorithm = A2CAlgorithmConfig(epoch_length=1, n_rollout_steps=4, rollout_evaluator=None)
    rc = RunContext(
        env=cartpole,
        wrappers={TimeLimitWrapper: {"max_episode_steps": 30}},
        algorithm=algorithm,
        overrides={"runner.concurrency": 2},
        silent=True,
        **composers(),
    )
    rc.train(n_epochs=1)
    written = OmegaConf.load(f"{rc.run_dir}/hydra_config.yaml")
    assert written.env._target_.endswith("test_run_context.cartpole")
    assert written.wrappers[0]._target_ == "maze.core.wrappers.time_limit_wrapper.TimeLimitWrapper"
    assert written.algorithm._target_.endswith("A2CAlgorithmConfig")
    assert written.algorithm.n_rollout_steps == 4
    assert written.model.policy._target_.endswith("ProbabilisticPolicyComposer")
    assert any("out_features=5" in line for line in written.model.policy.networks[0]._layers_)
    assert "from Python" in Path(rc.run_dir, "command.txt").read_text(encoding="utf-8")
    assert not any("Resume" in purpose for purpose in run_commands(Path(rc.run_dir), Path.cwd())), "no command can"
    assert "cartpole-flatten_concat-a2c-SharedStateCriticComposer-dev" in rc.run_dir


def test_overrides_reach_into_objects_and_leave_them_alone() -> None:
    algorithm = A2CAlgorithmConfig(epoch_length=1, n_rollout_steps=4, lr=0.1, rollout_evaluator=None)
    rc = RunContext(algorithm=algorithm, overrides={"algorithm.lr": 0.2})
    assert rc.config[RunMode.TRAINING].algorithm.lr == 0.2
    assert algorithm.lr == 0.1


def test_several_runs_can_share_an_evaluator_which_is_not_changed() -> None:
    from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv

    evaluator = RolloutEvaluator(SequentialVectorEnv([cartpole]), n_episodes=1, model_selection=None)
    algorithm = A2CAlgorithmConfig(epoch_length=1, n_rollout_steps=4, rollout_evaluator=evaluator)
    runs = [
        RunContext(env=cartpole, algorithm=algorithm, overrides={"runner.concurrency": 2, **SEEDS}, silent=True)
        for _ in range(2)
    ]
    for rc in runs:
        rc.train(n_epochs=1)
    assert evaluator.model_selection is None
    assert_same_weights(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize("as_object", [True, False], ids=["model composer", "mapping"])
def test_a_whole_model_may_be_given(as_object: bool) -> None:
    networks = [{"_target_": NET, "non_lin": "torch.nn.Tanh", "hidden_units": [7]}]
    value_networks = [{"_target_": VALUE_NET, "non_lin": "torch.nn.Tanh", "hidden_units": [7]}]
    parts = {
        "distribution_mapper_config": [],
        "policy": {
            "_target_": f"{ProbabilisticPolicyComposer.__module__}.ProbabilisticPolicyComposer",
            "networks": networks,
            "substeps_with_separate_agent_nets": [],
        },
        "critic": {
            "_target_": "maze.perception.models.critics.SharedStateCriticComposer",
            "networks": value_networks,
            "stack_observations": False,
        },
    }
    env = cartpole()
    model: Any = {"_target_": "maze.perception.models.custom_model_composer.CustomModelComposer", **parts}
    if as_object:
        model = CustomModelComposer(env.action_spaces_dict, env.observation_spaces_dict, env.agent_counts_dict, **parts)
    rc = trained(model=model)
    assert isinstance(rc.policy, TorchPolicy)
    assert any(tensor.shape == (7, 4) for tensor in flat(rc.policy.state_dict()))


def test_mappings_are_merged_into_the_configuration_unless_they_name_a_target() -> None:
    rc = context(env={"name": "Acrobot-v1"}, runner={"dump_interval": 3})
    cfg = rc.config[RunMode.TRAINING]
    assert (cfg.env.name, cfg.runner.dump_interval) == ("Acrobot-v1", 3)
    assert cfg.runner._target_.endswith("ACDevRunner")
    rc = context(env={"_target_": f"{GymMazeEnv.__module__}.GymMazeEnv", "env": "Acrobot-v1"})
    assert "name" not in rc.config[RunMode.TRAINING].env
    assert rc.env_factory().action_space["action"].n == 3


def test_an_algorithm_may_be_a_mapping_of_its_hyperparameters() -> None:
    rc = RunContext(
        algorithm={"_target_": f"{PPOAlgorithmConfig.__module__}.PPOAlgorithmConfig", "clip_range": 0.1}, silent=True
    )
    assert "PPO" in str(rc.config[RunMode.TRAINING].runner.trainer_class)


# -- evaluation and rollouts -----------------------------------------------------------------------------------


def test_evaluations_with_the_same_arguments_give_the_same_statistics() -> None:
    rc = trained(overrides={"seeding.agent_base_seed": 5})
    first, second = (rc.evaluate(n_episodes=3, deterministic=True) for _ in range(2))
    assert {key: str(value) for key, value in first.items()} == {key: str(value) for key, value in second.items()}


def test_rollouts_give_statistics_trajectories_and_events_like_the_command_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rc = trained()
    frame = rc.rollout(n_episodes=3, max_episode_steps=20)
    parallel = rc.rollout(n_episodes=3, max_episode_steps=20, runner="parallel", n_processes=2)
    rewards = frame.loc[("BaseEnvEvents", "reward")].value
    assert rewards["episode_count"] == 3
    assert rewards.equals(parallel.loc[("BaseEnvEvents", "reward")].value)
    assert len(list(Path(frame.attrs["trajectory_dir"]).iterdir())) == 3
    assert Path(frame.attrs["event_log_dir"]).is_dir()
    assert Path(frame.attrs["run_dir"]).parent == Path(rc.run_dir) == Path(parallel.attrs["run_dir"]).parent
    seeds = [f"{key}={value}" for key, value in SEEDS.items()]
    command = ["env.name=CartPole-v1", "policy=torch_policy", f"input_dir={rc.run_dir}", "runner=sequential", *seeds]
    capfd.readouterr()
    assert main([*command, "runner.n_episodes=3", "runner.max_episode_steps=20"]) == 0
    row = next(line for line in capfd.readouterr().out.splitlines() if line.split("|")[1:2] and " mean " in line)
    assert float(row.split("|")[-1]) == pytest.approx(rewards["mean"], abs=5e-4)


def test_a_policy_by_name_is_rolled_out_without_training() -> None:
    rc = RunContext(policy="random_policy", overrides={**CARTPOLE, **SEEDS}, silent=True)
    frame = rc.rollout(n_episodes=2, max_episode_steps=5)
    assert frame.loc[("BaseEnvEvents", "reward", "total_step_count"), "value"] == 10
    assert rc.config[RunMode.TRAINING] is None
    assert frame.attrs["run_dir"].startswith(str(Path("outputs").absolute()))


def test_normalization_statistics_are_those_of_the_training_run() -> None:
    rc = trained(
        wrappers="vector_obs",
        model="vector_obs",
        critic="template_state",
        overrides={"runner.normalization_samples": 50},
    )
    statistics = rc.env_factory().get_statistics()
    assert statistics is not None
    again = context(run_dir=rc.run_dir, wrappers="vector_obs", model="vector_obs", critic="template_state")
    assert again.policy is not None
    assert str(again.env_factory().get_statistics()) == str(statistics)


# -- imitation -------------------------------------------------------------------------------------------------


def test_a_policy_is_imitated_from_its_trajectories() -> None:
    expert = RunContext(policy="dummy_cartpole", overrides={**CARTPOLE, **SEEDS}, silent=True)
    recorded = expert.rollout(n_episodes=3, max_episode_steps=40).attrs["trajectory_dir"]
    short = {"algorithm.max_episode_steps": 20}
    evaluated = {"algorithm.n_eval_episodes": 3}
    by_directory = context("bc", overrides={"runner.dataset.dir_or_file": recorded, **short, **evaluated})
    by_directory.train(n_epochs=1)
    by_directory.train(n_epochs=1)
    found = by_directory.evaluate(policy=DummyCartPolePolicy())
    assert found[LogStatsKey(BaseEnvEvents.reward, "episode_count", None)] == 3
    assert found.mean_reward == 20, "the limit of evaluations also holds here"
    dataset = InMemoryDataset(input_data=recorded, conversion_env_factory=cartpole)
    by_object = context("bc", overrides={"runner.dataset": dataset, **short})
    by_object.train(n_epochs=1)
    assert by_object.results.status == "completed"


# -- several runs ------------------------------------------------------------------------------------------------


def test_lists_are_combined_and_every_run_has_its_row() -> None:
    seeds = [{"env_base_seed": seed, "agent_base_seed": seed} for seed in (1, 2)]
    rc = context(overrides={"algorithm.lr": [0.001, 0.002], "seeding": seeds}, multirun=True)
    rc.train(n_epochs=1)
    frame = rc.results_frame()
    assert frame["algorithm.lr"].tolist() == [0.001, 0.001, 0.002, 0.002]
    assert frame["env_base_seed"].tolist() == frame["agent_base_seed"].tolist() == [1, 2, 1, 2]
    assert frame["status"].tolist() == ["completed"] * 4
    assert [Path(directory).name for directory in frame["run_dir"]] == ["0", "1", "2", "3"]
    assert Path(rc.run_dir[0]).parent.joinpath("results.csv").is_file()
    single = trained(overrides={"algorithm.lr": 0.002, "seeding.env_base_seed": 2, "seeding.agent_base_seed": 2})
    assert_same_weights(weights(single), weights(rc.run_dir[3]))
    with pytest.raises(RunContextError, match="trained once"):
        rc.train(n_epochs=1)
    observation = rc.env_factory[0]().reset()
    assert len(rc.compute_action(observation)) == len(rc.policy) == len(rc.evaluate(n_episodes=1)) == 4


def test_runs_do_not_share_networks() -> None:
    parts = composers()
    before = [tensor.clone() for tensor in flat(parts["policy"].policy.state_dict())]
    rc = context(env=cartpole, overrides={"algorithm.lr": [0.001, 0.1]}, multirun=True, **parts)
    rc.train(n_epochs=1)
    assert [result.overrides for result in rc.results] == [{"algorithm.lr": 0.001}, {"algorithm.lr": 0.1}]
    after = flat(parts["policy"].policy.state_dict())
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_results_have_the_violation_of_constraints_and_kpis_keep_their_sign() -> None:
    evaluator = "algorithm.rollout_evaluator"
    limits = [["reward <= 1"], ["reward >= 1"]]
    rc = context(overrides={f"+{evaluator}.constraints": limits, f"+{evaluator}.maximize": False}, multirun=True)
    rc.train(n_epochs=1)
    broken, kept = rc.results
    assert broken.violation > 0.0 == kept.violation
    assert min(broken.best_score, kept.best_score) > 1.0, "every step of CartPole pays 1"
    assert not kept.maximize
    assert rc.results_frame()["violation"].tolist() == [broken.violation, 0.0]


def test_runs_that_fail_are_reported_after_the_others_have_been_trained() -> None:
    rc = context(overrides={"env.name": ["NoSuchEnv-v1", "CartPole-v1"]}, multirun=True)
    with pytest.raises(RunContextError, match=r"1 of 2 runs failed \(0\)"):
        rc.train(n_epochs=1)
    assert [result.status for result in rc.results] == ["failed", "completed"]
    assert "NoSuchEnv" in rc.results[0].error


def test_an_interrupted_multirun_resumes_and_starts_the_runs_that_had_not_begun() -> None:
    rates = {"algorithm.lr": [0.001, 0.002]}
    whole = context(overrides=rates, multirun=True)
    whole.train(n_epochs=2)
    context(overrides=rates, multirun=True, run_dir="cut").train(n_epochs=1)
    shutil.rmtree("cut/1")
    resumed = context(overrides={**rates, "resume": True}, multirun=True, run_dir="cut")
    resumed.train(n_epochs=2)
    for one, other in zip(whole.run_dir, resumed.run_dir, strict=True):
        assert_same_weights(weights(one), weights(other))


@pytest.mark.long
def test_a_launcher_trains_in_other_processes_with_the_same_results() -> None:
    lambdas: dict[str, Any] = {"env": lambda: GymMazeEnv("CartPole-v1")}
    overrides = {"algorithm.lr": [0.001, 0.002]}
    here = context(overrides=overrides, multirun=True, **lambdas)
    here.train(n_epochs=1)
    there = context(overrides=overrides, multirun=True, launcher="local", **lambdas)
    there.train(n_epochs=1)
    for one, other in zip(here.run_dir, there.run_dir, strict=True):
        assert_same_weights(weights(one), weights(other))
    assert [result.best_score for result in here.results] == [result.best_score for result in there.results]
    assert_same_weights(here.policy[1].state_dict(), there.policy[1].state_dict())


@pytest.mark.slow
def test_a_script_ends_cleanly_without_closing_its_run_context(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from maze.api.run_context import RunContext\n"
        "if __name__ == '__main__':\n"
        "    rc = RunContext(algorithm='a2c', runner='local', overrides={\n"
        "        'env.name': 'CartPole-v1', 'runner.concurrency': 2, 'algorithm.epoch_length': 1,\n"
        "        'algorithm.n_rollout_steps': 4, 'algorithm.rollout_evaluator.n_episodes': 1})\n"
        "    rc.train(n_epochs=1)\n",
        encoding="utf-8",
    )
    finished = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
