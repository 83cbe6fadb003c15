"""The command lines that the documentation shows for training, and the rollouts that follow them, as written.

Only what takes time is overridden. A story is a sequence of commands of one user in one directory; ``{run}`` is the
directory that the story's last training left, ``{recorded}`` that of its last rollout.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from maze.maze_cli import main

ON_POLICY = (
    *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4"),
    *("runner.concurrency=2", "algorithm.rollout_evaluator.n_episodes=1"),
)
SAC = (
    *("algorithm.n_epochs=1", "algorithm.epoch_length=2", "algorithm.batch_size=4"),
    *("algorithm.initial_buffer_size=16", "algorithm.rollout_evaluator.n_episodes=1"),
)
SHORTER = {
    "a2c": ON_POLICY,
    "ppo": (*ON_POLICY, "algorithm.batch_size=4"),
    "impala": (
        *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4"),
        *("algorithm.num_actors=2", "algorithm.actors_batch_size=2", "algorithm.rollout_evaluator.n_episodes=1"),
    ),
    "sac": SAC,
    "sacfd": SAC,
    "bc": ("algorithm.n_epochs=1", "algorithm.eval_every_k_iterations=2", "algorithm.n_eval_episodes=2"),
    "es": (
        *("algorithm.n_epochs=1", "algorithm.n_rollouts_per_update=2", "algorithm.max_steps=20"),
        *("runner.n_eval_rollouts=1", "runner.shared_noise_table_size=1000000"),
    ),
}
CUTTING = "wrappers=tutorial_cutting_2d model=tutorial_cutting_2d_struct_masked"
TRAINED_FILES = {"state_dict.pt", "latest.pt", "spaces_config.pkl", "hydra_config.yaml", "command.txt"}

STORIES = {
    "first_example": [
        "-cn conf_train env.name=CartPole-v0 algorithm=a2c algorithm.n_epochs=5",
        "env.name=CartPole-v0 policy=torch_policy input_dir={run}",
        "env.name=CartPole-v0 policy=torch_policy input_dir={run} runner=sequential runner.render=true",
    ],
    "basic_tutorial": [
        (
            "-cn conf_train env=tutorial_cutting_2d_basic wrappers=tutorial_cutting_2d_basic "
            "model=tutorial_cutting_2d_basic algorithm=ppo"
        )
    ],
    "events_tutorial": [
        (
            "-cn conf_train env=tutorial_cutting_2d_events wrappers=tutorial_cutting_2d_events "
            "model=tutorial_cutting_2d_events algorithm=ppo"
        )
    ],
    "training_on_a_gym_environment": ["-cn conf_train env=gym_env env.name=CartPole-v0"],
    "training_on_another_gym_environment": ["-cn conf_train env=gym_env env.name=LunarLander-v2"],
    "wrappers_and_model": ["-cn conf_train env=gym_env env.name=LunarLander-v2 wrappers=vector_obs model=vector_obs"],
    "masked_cutting": [
        f"-cn conf_train env=tutorial_cutting_2d_struct_masked {CUTTING}",
        f"policy=torch_policy env=tutorial_cutting_2d_struct_masked {CUTTING} input_dir={{run}}",
    ],
    "masked_cutting_with_ppo": [
        f"-cn conf_train algorithm=ppo env=tutorial_cutting_2d_struct_masked {CUTTING}",
    ],
    "structured_cutting": [
        (
            "-cn conf_train env=tutorial_cutting_2d_struct wrappers=tutorial_cutting_2d "
            "model=tutorial_cutting_2d_struct algorithm=ppo"
        )
    ],
    "greedy_cutting": ["env=tutorial_cutting_2d_flat policy=tutorial_cutting_2d_greedy_policy"],
    "starting_from_an_earlier_run": [
        "-cn conf_train env=gym_env env.name=LunarLander-v2 algorithm=ppo",
        "-cn conf_train env=gym_env env.name=LunarLander-v2 algorithm=ppo algorithm.lr=0.0001 input_dir={run}",
        "-cn conf_train env=gym_env env.name=LunarLander-v2 algorithm=a2c input_dir={run}",
    ],
    "imitation_and_fine_tuning": [
        (
            "env.name=LunarLander-v2 policy=lunar_lander_heuristics runner=sequential runner.render=true "
            "runner.n_episodes=3"
        ),
        "env.name=LunarLander-v2 policy=lunar_lander_heuristics runner.n_episodes=3",
        (
            "-cn conf_train env.name=LunarLander-v2 model=vector_obs wrappers=vector_obs algorithm=bc "
            "algorithm.validation_percentage=50 runner.dataset.dir_or_file={recorded}/trajectory_data"
        ),
        "env.name=LunarLander-v2 model=vector_obs wrappers=vector_obs policy=torch_policy input_dir={run}",
        (
            "-cn conf_train env.name=LunarLander-v2 model=vector_obs critic=template_state wrappers=vector_obs "
            "algorithm=ppo runner.eval_repeats=100 runner.critic_burn_in_epochs=10 input_dir={run}"
        ),
    ],
    "one_value": ["-cn conf_train env.name=CartPole-v0 algorithm=ppo algorithm.lr=0.0001"],
    "an_experiment": ["-cn conf_train +experiment=cartpole_ppo_wrappers"],
    "a2c": ["-cn conf_train env.name=CartPole-v0 algorithm=a2c model=vector_obs critic=template_state"],
    "ppo": ["-cn conf_train env.name=CartPole-v0 algorithm=ppo model=vector_obs critic=template_state"],
    "impala": ["-cn conf_train env.name=CartPole-v0 algorithm=impala model=vector_obs critic=template_state"],
    "sac": ["-cn conf_train env.name=Pendulum-v0 algorithm=sac model=vector_obs critic=template_state_action"],
    "sacfd": [
        "env.name=LunarLander-v2 policy=lunar_lander_heuristics runner.n_episodes=1000",
        (
            "-cn conf_train env.name=LunarLander-v2 algorithm=sacfd model=flatten_concat "
            "critic=flatten_concat_state_action "
            "runner.initial_demonstration_trajectories.input_data={recorded}/trajectory_data"
        ),
    ],
    "es": ["-cn conf_train env.name=CartPole-v0 algorithm=es model=vector_obs"],
    "cheat_sheet": [
        "-cn conf_rollout env.name=CartPole-v1 policy=random_policy",
        "-cn conf_rollout env.name=CartPole-v1 policy=random_policy runner=sequential runner.render=true",
        "-cn conf_train env.name=CartPole-v1 algorithm=es model=vector_obs",
        "-cn conf_train env.name=CartPole-v1 algorithm=a2c model=vector_obs critic=template_state",
        "-cn conf_train env.name=CartPole-v1 algorithm=a2c model=vector_obs critic=template_state input_dir={run}",
        "-cn conf_rollout env.name=CartPole-v1 model=vector_obs policy=torch_policy input_dir={run}",
    ],
    "own_environment_factory": ["-cn conf_train env._target_=my_project.env_factory.make_env"],
}


ONE_OF_EACH_KIND = ("first_example", "masked_cutting", "greedy_cutting", "an_experiment", "impala", "sac", "es")


def shorter(arguments: list[str]) -> list[str]:
    """What has to be overridden for a command to take a second."""
    choices = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if "conf_train" not in arguments:
        n_processes = () if choices.get("runner") == "sequential" else ("runner.n_processes=2",)
        return ["runner.n_episodes=2", "runner.max_episode_steps=20", *n_processes]
    algorithm = "ppo" if "+experiment" in choices else choices.get("algorithm", "es")
    has_statistics = choices.get("wrappers") == "vector_obs" or "+experiment" in choices
    return [*SHORTER[algorithm], *(["runner.normalization_samples=50"] if has_statistics else [])]


@pytest.fixture(autouse=True)
def _in_an_own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "env_factory.py").write_text(
        "from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv\n\n\n"
        "def make_env(name: str) -> GymMazeEnv:\n    return GymMazeEnv(name)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(retired|out of date|successor|current version)")
@pytest.mark.parametrize(
    "story",
    [pytest.param(story, marks=[] if story in ONE_OF_EACH_KIND else [pytest.mark.long]) for story in STORIES],
)
def test_documented_commands_run_and_leave_their_files(story: str, tmp_path: Path) -> None:
    directories = {"run": "", "recorded": ""}
    for number, command in enumerate(STORIES[story]):
        arguments = shlex.split(command.format(**directories))
        directory = tmp_path / f"run_{number}"
        assert main([*arguments, *shorter(arguments), f"hydra.run.dir={directory}"]) == 0, command
        files = {path.name for path in directory.iterdir()}
        if "conf_train" in arguments:
            directories["run"] = str(directory)
            assert files >= TRAINED_FILES
            assert any(name.startswith("events.out.tfevents") for name in files)
        else:
            directories["recorded"] = str(directory)
            assert len(list((directory / "trajectory_data").iterdir())) >= 1
            assert (directory / "event_logs").is_dir()
