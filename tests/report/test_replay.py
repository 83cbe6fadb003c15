"""Recorded episodes under another reward, and after another decision."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.errors import CheckpointError, ConfigError, EnvironmentContractError
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord, load_trajectory
from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.utils.config_utils import make_env_from_hydra
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze.evaluation.replay import replayed_measures, replayed_rewards, reward_replay, what_if
from maze.maze_cli import main
from maze_envs.logistics.cutting_2d.env.events import CuttingEvents, InventoryEvents
from maze_envs.logistics.cutting_2d.reward.raw_piece_usage import RawPieceUsageRewardAggregator
from maze_envs.logistics.dispatching.maze_env import dispatching_env
from tests.report.browser import NARROW, WIDE, OpenPage, accessibility_faults, cut_off

CUTTING = ("env=tutorial_cutting_2d_struct_masked", "wrappers=tutorial_cutting_2d")
"""Two sub-steps with masks."""


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recorded(env: MazeEnv[Any], policy: Policy | None = None, seed: Any = 1, most: int = 1000) -> StateTrajectoryRecord:
    """An episode, stored and loaded."""
    recording: Any = TrajectoryRecordingWrapper.wrap(env)
    policy = policy or RandomPolicy(env.action_spaces_dict)
    policy.seed(2)
    recording.seed(seed)
    observation, done = recording.reset(), False
    for _ in range(most):
        if done:
            break
        action = policy.compute_action(observation, None, None, recording.actor_id())
        observation, _, done, _ = recording.step(action)
    episode: StateTrajectoryRecord = recording.episode_record
    recording.publish_trajectory()
    TrajectoryWriterFile("stored").write(episode)
    loaded: Any = load_trajectory(Path("stored") / f"{episode.id}.pkl")
    assert isinstance(loaded, StateTrajectoryRecord)
    return loaded


def cartpole(n_steps: int = 30, name: str = "CartPole-v1") -> Any:
    return TimeLimitWrapper.wrap(GymMazeEnv(name), max_episode_steps=n_steps)


def cutting(n_steps: int = 12) -> Any:
    env = make_env_from_hydra("maze.conf", env="cutting_2d")
    return TimeLimitWrapper.wrap(env, max_episode_steps=n_steps)


# -- rewards ----------------------------------------------------------------------------------------------------------


class CutsAndStock(RewardAggregatorInterface):
    """1 for each cut, and a hundredth for each piece in the state after the step; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.n_asked = 0

    def get_interfaces(self) -> list[type]:
        return [CuttingEvents]

    def summarize_reward(self, maze_state: Any = None) -> float:
        self.n_asked += 1
        assert not self.query_events(InventoryEvents.piece_replenished), "it does not subscribe to these"
        return len(self.query_events(CuttingEvents.valid_cut)) + 0.01 * len(maze_state.inventory)


class Kpis(KpiCalculator):
    def calculate_kpis(self, episode_event_log: Any, last_maze_state: Any) -> dict[str, float]:
        rewards = [event.value for event in episode_event_log.query_events(BaseEnvEvents.reward)]
        return {"least_reward": min(rewards), "left": len(last_maze_state.inventory)}


def test_rewards_are_computed_from_the_events_of_each_step_and_the_next_state() -> None:
    episode = recorded(cutting())
    steps = episode.step_records[:-1]
    n_cuts = [len(step.step_event_log.query_events(CuttingEvents.valid_cut)) for step in steps]
    expected = [
        n + 0.01 * len(after.maze_state.inventory) for n, after in zip(n_cuts, episode.step_records[1:], strict=True)
    ]
    aggregator = CutsAndStock()
    assert replayed_rewards(episode, aggregator) == expected
    assert aggregator.n_asked == 0, "a copy is used: its state belongs to one episode"
    measures = replayed_measures(episode, expected, Kpis())
    assert measures == {
        "return": pytest.approx(sum(expected)),
        "steps": 12.0,
        "least_reward": min(expected),
        "left": len(episode.step_records[-1].maze_state.inventory),
    }


def test_the_recorded_reward_is_recomputed_without_stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    env = cutting()
    episode = recorded(env)
    own = env.core_env.reward_aggregator
    monkeypatch.setattr(type(env.core_env), "step", None)
    assert replayed_rewards(episode, own) == [step.reward for step in episode.step_records[:-1]]
    replayed = reward_replay([episode] * 3, RawPieceUsageRewardAggregator(2.0), None, env)
    usage, n_steps = replayed.comparison.played[1].measures["raw_piece_usage_per_step"][0, 0], 12
    assert replayed.comparison.played[1].measures["return"][0].tolist() == pytest.approx([-2.0 * usage * n_steps] * 3)
    assert replayed.further is None
    replayed = reward_replay([episode], None, Kpis(), env)
    assert replayed.further is not None
    assert replayed.further.measures == ["least_reward", "left"]


class Fails(RawPieceUsageRewardAggregator):
    def summarize_reward(self, maze_state: Any = None) -> float:
        raise KeyError("price")


def test_unreplayable_episodes_give_one_sentence() -> None:
    episode = recorded(cartpole())
    with pytest.raises(ConfigError, match=r"Fails raised KeyError: 'price' in step 0 of the recorded episode"):
        replayed_rewards(episode, Fails(1.0))
    single: Any = episode
    for wrong in ([], single):
        with pytest.raises(ConfigError, match="a list of at least one recorded episode, found "):
            reward_replay(wrong)
    episode.step_records[3].step_event_log = None
    with pytest.raises(ConfigError, match="steps without events"):
        reward_replay([episode])


# -- what if ----------------------------------------------------------------------------------------------------------


class Always(Policy):
    def __init__(self, action: dict[str, Any]) -> None:
        self.action = action

    def compute_action(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.action


def states(episode: StateTrajectoryRecord) -> np.ndarray[Any, Any]:
    return np.array([record.maze_state for record in episode.step_records])


def test_a_what_if_branch_equals_an_environment_in_which_the_action_was_taken() -> None:
    episode = recorded(cartpole())
    actions = [action["action"] for _, action in episode.action_record.actions]  # type: ignore[union-attr]
    step = 4
    compared = what_if(cartpole(), episode, step, 1 - actions[step], Always({"action": 1}))
    assert (states(compared.recorded) == states(episode)).all()
    env = cartpole()
    env.seed(1)
    expected = [env.reset()["observation"]]
    for action in [*actions[:step], 1 - actions[step], *[1] * (len(compared.other) - step - 2)]:
        observation, _, done, _ = env.step({"action": action})
        expected.append(observation["observation"])
    assert done
    assert (states(compared.other) == np.array(expected)).all()
    assert compared.measures[1] == {"return": len(expected) - 1, "steps": len(expected) - 1}
    rows = {name: (one, other) for name, one, other in compared.summary()}
    assert rows[f"return from step {step} on"] == (len(episode) - 1 - step, len(expected) - 1 - step)


def test_a_replay_with_the_same_policy_reproduces_the_episode() -> None:
    """Common random numbers of environment and agent: dispatching draws orders, the policy draws actions."""
    env = dispatching_env(horizon=30)
    episode = recorded(env)
    policy = RandomPolicy(env.action_spaces_dict)
    compared = what_if(dispatching_env(horizon=30), episode, 5, policy=policy, agent_seed=2, deterministic=False)
    assert all(one == other for _, one, other in compared.summary())
    of_events = [name for name, *_ in compared.summary() if "Events." in name]
    assert of_events
    assert all(name.startswith("from step 5 on: ") for name in of_events)
    again = what_if(dispatching_env(horizon=30), compared.other, 5, policy=policy, agent_seed=2, deterministic=False)
    assert again.summary() == compared.summary()


def test_an_exception_of_the_policy_is_not_reported_as_a_failure_of_the_environment() -> None:
    class Divides(Always):
        def compute_action(self, *arguments: Any, **named: Any) -> Any:
            return 1 // 0

    with pytest.raises(ZeroDivisionError):
        what_if(cartpole(), recorded(cartpole()), 2, policy=Divides(0))


def test_future_orders_are_independent_of_the_actions() -> None:
    env = dispatching_env(horizon=30)
    episode = recorded(env)
    waits = Always({"order": 8})
    compared = what_if(dispatching_env(horizon=30), episode, 3, policy=waits, substep=1)
    _, other = compared.measures
    assert other["return"] < compared.measures[0]["return"]
    assert [len(one.by_substep()) for one in compared.other.step_records[:3]] == [
        len(one.by_substep()) for one in episode.step_records[:3]
    ]
    third = compared.other.step_records[3].by_substep()
    assert third[0].maze_action == episode.step_records[3].by_substep()[0].maze_action, "decided before the change"
    assert all(substep.maze_action == {"order": 8} for substep in third[1:])


def test_recorded_actions_are_replayed_as_long_as_they_are_valid() -> None:
    episode = recorded(cutting())
    before = episode.action_record.actions[2][1]  # type: ignore[union-attr]
    compared = what_if(cutting(), episode, 2, {"cut_rotation": 1 - before["cut_rotation"]})
    assert compared.measures[1]["steps"] == 12
    assert compared.other.action_record is not None
    for at, (one, other) in enumerate(
        zip(episode.action_record.actions, compared.other.action_record.actions, strict=True)  # type: ignore[union-attr]
    ):
        assert {head for head in one[1] if one[1][head] != other[1][head]} == ({"cut_rotation"} if at == 2 else set())


def test_out_of_bounds_samples_of_policies_are_clipped_and_user_actions_are_refused() -> None:
    """Environments clip actions; the record has them as they were drawn."""
    drawn = {"action": np.array([5.0], np.float32)}
    episode = recorded(cartpole(6, "Pendulum-v1"), Always(drawn))
    compared = what_if(cartpole(6, "Pendulum-v1"), episode, 3, [1.5])
    assert compared.other.step_records[3].maze_action == pytest.approx([1.5])
    assert compared.other.step_records[4].maze_action == pytest.approx([2.0])
    with pytest.raises(ConfigError, match="expected an element of Box"):
        what_if(cartpole(6, "Pendulum-v1"), episode, 3, [5.0])


class NoisyCartPole(GymMazeEnv):
    """Draw from an unseeded generator."""

    def step(self, action: Any) -> Any:
        state = self.core_env.env.unwrapped.state
        self.core_env.env.unwrapped.state = np.asarray(state) + np.random.default_rng().normal(size=4) * 1e-3
        return super().step(action)


@pytest.mark.parametrize(
    ("make_env", "arguments", "error", "message"),
    [
        (
            cartpole,
            {"step": 99, "action": 1},
            ConfigError,
            r"what_if.step: the episode has the steps 0 to \d+, found 99",
        ),
        (cartpole, {"step": 1, "action": 1, "substep": 3}, ConfigError, "step 1 has the sub-steps 0 to 0, found 3"),
        (cartpole, {"step": "0", "action": 1}, ConfigError, "what_if.step: expected a whole number of .* found '0'"),
        (cartpole, {"step": 0, "action": 1, "substep": 0.5}, ConfigError, "what_if.substep: expected a whole number"),
        (cartpole, {"step": 1}, ConfigError, "expected action, policy, or both"),
        (lambda: cartpole, {"step": 1, "action": 1}, ConfigError, "what_if: env: expected a MazeEnv, found <function"),
        (cartpole, {"step": 1, "policy": "random"}, ConfigError, "what_if: policy: expected a Policy, found 'random'"),
        (
            cartpole,
            {"step": 1, "action": 5},
            ConfigError,
            r"step 1, .*action `action`: expected an element of Discrete",
        ),
        (cartpole, {"step": 1, "action": {"push": 1}}, ConfigError, "has the actions action, found push"),
        (
            lambda: cartpole(name="Acrobot-v1"),
            {"step": 1, "action": 1},
            CheckpointError,
            "Either the environment, its arguments",
        ),
        (lambda: cartpole(5), {"step": 1, "action": 1}, CheckpointError, r"done is True, recorded was False"),
        (lambda: NoisyCartPole("CartPole-v1"), {"step": 1, "action": 1}, CheckpointError, "not deterministic"),
    ],
)
def test_invalid_what_if_arguments_give_one_sentence(
    make_env: Callable[[], Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    episode = recorded(cartpole(name="CartPole-v1"), Always({"action": 1}) if error is CheckpointError else None)
    with pytest.raises(error, match=message) as raised:
        what_if(make_env(), episode, **arguments)
    assert "\n" not in str(raised.value)


def test_a_masked_action_is_refused_with_those_that_are_allowed() -> None:
    episode = recorded(dispatching_env(horizon=30))
    with pytest.raises(ConfigError, match=r"action `order`: 7 is masked by `order_mask`, which allows [\d, ]*8"):
        what_if(dispatching_env(horizon=30), episode, 0, 7)


def test_recorded_actions_that_are_impossible_after_a_change_are_refused() -> None:
    episode = recorded(dispatching_env(horizon=30))
    waits = episode.action_record.actions[0][1]["order"] == 8  # type: ignore[union-attr]
    with pytest.raises(
        EnvironmentContractError, match=r"recorded action of decision \d+ is invalid .*what_if.policy=<option or run>"
    ):
        what_if(dispatching_env(horizon=30), episode, 0, 0 if waits else 8)


@pytest.mark.parametrize("lacks", ["seed", "record"])
def test_an_episode_without_its_seed_cannot_be_played_again(lacks: str) -> None:
    episode = recorded(cartpole())
    if lacks == "seed":
        episode.action_record.seed = None  # type: ignore[union-attr]
    else:
        del episode.action_record
    with pytest.raises(CheckpointError, match="recorded without its seed and actions"):
        what_if(cartpole(), episode, 1, 1)


def test_only_the_first_episode_after_seeding_has_a_seed() -> None:
    env: Any = TrajectoryRecordingWrapper.wrap(cartpole())
    env.seed(3)
    env.reset()
    env.step({"action": 1})
    twin: Any = TrajectoryRecordingWrapper.wrap(cartpole())
    twin.reset()
    twin.clone_from(env)
    twin.step({"action": 0})
    assert len(env.episode_record.action_record) == 1
    assert (twin.episode_record.action_record.seed, len(twin.episode_record.action_record)) == (3, 2)
    env.reset()
    assert env.episode_record.action_record.seed is None


# -- the command ------------------------------------------------------------------------------------------------------


def replay(*arguments: str) -> int:
    return main(["-cn", "conf_replay", "hydra.run.dir=replayed", *arguments])


def roll_out(*arguments: str) -> Path:
    """The first episode of a rollout."""
    seeds = ("seeding.env_base_seed=3", "seeding.agent_base_seed=4")
    assert main([*arguments, *seeds, "runner=sequential", "hydra.run.dir=rollout"]) == 0
    return min(Path("rollout/trajectory_data").glob("*.pkl"))


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.mark.long
def test_sub_steps_with_masks_are_changed_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The environment, its wrappers, its limit of steps, the policy and its seed come from the rollout."""
    episode = roll_out(*CUTTING, "runner.n_episodes=3", "runner.max_episode_steps=6")
    assert replay(f"trajectory_data={episode}", "what_if.step=2", "what_if.action={piece_idx: 0}") == 0
    data = data_of(Path("replayed/what_if.html"))
    assert data["names"] == ["recorded", "what if"]
    assert len(data["steps"]) == len(data["other"])
    assert data["steps"][: data["start"]] == data["other"][: data["start"]]
    assert [row[0] for row in data["summary"]][:3] == ["return", "return from step 2 on", "steps"]
    for wrong, message in (
        ("what_if.action={piece_idx: 3}", "is masked by `inventory_mask`, which allows 0"),
        ("what_if.action={rotation: 1}", "what_if.substep chooses another sub-step"),
    ):
        assert replay(f"trajectory_data={episode}", "what_if.step=0", wrong) == 1
        assert message in capsys.readouterr().err
    change = "what_if.action={cut_rotation: 1, cut_order: 1}"
    assert replay(f"trajectory_data={episode}", "what_if.step=2", "what_if.substep=1", change, "hydra.run.dir=cut") == 0
    (other,) = Path("replayed/trajectory_data").glob("*.pkl")
    assert other.name == episode.name


def test_episodes_of_an_instance_set_continue_with_the_policy_of_the_rollout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file is named relative to the directory of the rollout's command; each episode has its own agent seed."""
    rng = np.random.default_rng(1)
    machines = rng.random((3, 4, 3)).argsort(axis=-1)
    np.savez("shops.npz", durations=rng.integers(1, 100, (3, 4, 3)), machines=machines)
    roll_out("env=job_shop", "env.instances=shops.npz", "policy=random_policy", "runner.n_episodes=3")
    for number, file in enumerate(sorted(Path("rollout/trajectory_data").glob("*.pkl"))):
        loaded: Any = load_trajectory(file)
        ((head, choice),) = loaded.action_record.actions[0][1].items()
        change = ("what_if.step=0", f"what_if.action={{{head}: {choice}}}")  # the recorded action: nothing changes
        assert main(["-cn", "conf_replay", f"trajectory_data={file}", *change, f"hydra.run.dir={number}"]) == 0
        (other,) = Path(f"{number}/trajectory_data").glob("*.pkl")
        again: Any = load_trajectory(other)
        assert str(again.action_record.actions) == str(loaded.action_record.actions)
    assert "-> starting -cn conf_replay env=job_shop\n" in capsys.readouterr().out


def test_a_reward_is_replayed_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    roll_out("env=cutting_2d", "policy=cutting_2d_greedy_policy", "runner.n_episodes=3", "runner.max_episode_steps=6")
    reward = "{_target_: maze_envs.logistics.cutting_2d.reward.raw_piece_usage.RawPieceUsageRewardAggregator,"
    assert replay("trajectory_data=rollout", f"reward_aggregator={reward} reward_scale: 3}}") == 0
    lines = Path("replayed/episodes.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "policy,training,episode,episode_id,return,steps,raw_piece_usage_per_step,fulfilled_orders"
    for line in lines[4:]:
        _, _, _, _, total, steps, usage, _ = line.split(",")
        assert float(total) == pytest.approx(-3 * float(usage) * float(steps))
    assert "raw_piece_usage_per_step" in Path("replayed/report.html").read_text(encoding="utf-8")


def test_wrong_commands_are_one_sentence_each(capsys: pytest.CaptureFixture[str]) -> None:
    episode = roll_out("env.name=CartPole-v1", "runner.n_episodes=2", "runner.max_episode_steps=6")
    for arguments, message in (
        ((), "trajectory_data: expected the directory of a rollout"),
        (("trajectory_data=nowhere", "what_if.step=1"), "there are no trajectories"),
        (("trajectory_data=rollout",), "Nothing to replay"),
        (("trajectory_data=rollout", "what_if.step=1"), "holds 2 episodes; name the file of one of them"),
        ((f"trajectory_data={episode}", "what_if.step=-1"), "what_if.step"),
        (
            (f"trajectory_data={episode}", "what_if.step=1", "what_if.policy=unknown"),
            "what_if.policy: unknown is neither",
        ),
        ((f"trajectory_data={episode}", "what_if.step=1", "env.name=MountainCar-v0"), "replay differs from the record"),
    ):
        assert replay(*arguments) in (1, 2)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "Error: " in line]
        assert message in line
    bare = Path("bare.pkl")
    bare.write_bytes(episode.read_bytes())
    assert replay(f"trajectory_data={bare}", "what_if.step=1", "what_if.action=1") == 1
    assert "set the environment of the recording" in capsys.readouterr().err
    arguments = ("what_if.action=1", "what_if.policy=random", "env.name=CartPole-v1", "runner.max_episode_steps=6")
    assert replay(f"trajectory_data={bare}", "what_if.step=1", *arguments) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_both_branches_are_navigable_with_the_keyboard(open_page: OpenPage, width: int, scheme: str) -> None:
    env = dispatching_env(horizon=30)
    compared = what_if(dispatching_env(horizon=30), recorded(env), 3, policy=Always({"order": 8}), substep=1)
    path = compared.write_page("what_if.html", title="</script><img src=x onerror=alert(1)>")
    data = data_of(path)
    assert None in data["steps"] or None in data["other"], "steps have different numbers of sub-steps"
    page = open_page(path, width=width, scheme=scheme)
    last = len(data["steps"]) - 1
    assert page.locator("#position").inner_text() == f"sub-step {data['start']} of {last}"
    assert page.locator("#summary tbody tr").count() == len(data["summary"])
    assert page.locator("#name-0").inner_text() == "recorded"
    assert page.locator("#chart path").count() == 2
    for future, suffix in (("steps", ""), ("other", "-1")):
        shown = data[future][data["start"]]
        assert shown["action"] in page.locator(f"#facts{suffix}").inner_text()
        assert page.locator(f"#picture{suffix}").evaluate("each => each.naturalWidth") > 0
    assert page.locator("#facts-1 tr.differs").count() > 0
    page.locator("#query").select_option(label="another action in the other future")
    differing = [
        index
        for index, (one, other) in enumerate(zip(data["steps"], data["other"], strict=True))
        if (one and one["action"]) != (other and other["action"])
    ]
    assert page.locator("#matches").inner_text().startswith(f"{len(differing)} found")
    page.locator("#slider").focus()
    page.keyboard.press("End")
    page.keyboard.press("p")
    assert page.locator("#position").inner_text() == f"sub-step {[at for at in differing if at < last][-1]} of {last}"
    missing = next(i for i, pair in enumerate(zip(data["steps"], data["other"], strict=True)) if None in pair)
    page.keyboard.press("Home")
    for _ in range(missing):
        page.keyboard.press("ArrowRight")
    assert "no such step" in page.locator("main").inner_text()
    assert cut_off(page) == []
    assert accessibility_faults(page) == []


@pytest.mark.long
def test_the_commands_of_the_guide_run(capsys: pytest.CaptureFixture[str]) -> None:
    guides = Path(__file__).resolve().parents[2] / "docs" / "guide"
    page = (guides / "inspecting_results.md").read_text(encoding="utf-8")
    section = page.partition("## Counterfactual replay\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ maze-run (.*)$", "".join(blocks).replace("\\\n", " "), re.MULTILINE)
    assert len(commands) == 4
    for number, command in enumerate(commands):
        file = next((path.name for path in sorted(Path("run0/trajectory_data").glob("*.pkl"))), "")
        filled = command.replace("outputs/<rollout>/<time>", "run0").replace("<id>.pkl", file)
        quick = ("runner=sequential", "runner.n_episodes=2", "runner.max_episode_steps=14") if number == 0 else ()
        assert main([*shlex.split(filled), *quick, f"hydra.run.dir=run{number}"]) == 0
    assert Path("run1/report.html").is_file()
    assert Path("run2/what_if.html").is_file()
    assert Path("run3/what_if.html").is_file()
    assert "piece_idx: 0, cut_rotation" in capsys.readouterr().out
