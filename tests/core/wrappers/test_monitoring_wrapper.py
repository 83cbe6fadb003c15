from __future__ import annotations

import copy
import io
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from maze.core.env.action_conversion import DictActionConversion
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.log_events.monitoring_events import ActionEvents, ObservationEvents, RewardEvents
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.monitoring_wrapper import MazeEnvMonitoringWrapper, StepTimingEvents, StepTimingWrapper
from maze.core.wrappers.observation_visualization_wrapper import (
    ObservationVisualizationEvents,
    ObservationVisualizationWrapper,
)
from maze.core.wrappers.random_reset_wrapper import RandomResetWrapper
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import ObservationWrapper
from maze.core.wrappers.wrapper_factory import WrapperFactory
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.utils.log_stats_utils import SimpleStatsLoggingSetup
from maze.utils.tensorboard_reader import read_event_file
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.train.parallelization.toy_envs import RandomWalkCoreEnv, counting_env, random_walk_env

ALL = {"observation_logging": True, "action_logging": True, "reward_logging": True}


class Doubled(ObservationWrapper):
    def observation(self, observation):
        return {key: 2 * value for key, value in observation.items()}


def monitored(env, **kinds):
    return LogStatsWrapper.wrap(MazeEnvMonitoringWrapper.wrap(env, **{**ALL, **kinds}), logging_prefix="train")


def run_episode(env, actions):
    env.reset()
    for action in actions:
        env.step(action)
    env.publish_episode()


def attributes(log, event):
    return [record.attributes for record in log.query_events(event)]


def epoch_value(env, event, name, group):
    return env.epoch_stats.reduce()[LogStatsKey(event, name, group)]


def test_observations_before_and_after_the_wrappers_are_those_that_were_acted_on():
    env = monitored(Doubled(counting_env(((3, "terminated"),))))
    env.get_episode_event_log()
    env.reset()
    for move in (1, 2, 3):
        env.step({"move": move})
    log = env.get_episode_event_log()
    processed = [e for e in attributes(log, ObservationEvents.observation_processed) if e["name"] == "count"]
    original = [e for e in attributes(log, ObservationEvents.observation_original) if e["name"] == "count"]
    assert [e["value"][0] for e in original] == [0, 1, 2]
    assert [e["value"][0] for e in processed] == [0, 2, 4]
    assert {(e["step_key"], e["agent_name"]) for e in processed + original} == {("step_key_0", "agent_0")}


def test_the_statistics_of_an_epoch_hold_every_observation_that_was_acted_on():
    env = monitored(Doubled(counting_env(((3, "terminated"), (2, "terminated")))))
    run_episode(env, [{"move": 1}] * 3)
    run_episode(env, [{"move": 1}] * 2)
    stats = env.epoch_stats.reduce()
    group = ("step_key_0", "agent_0", "count")
    processed = stats[LogStatsKey(ObservationEvents.observation_processed, None, group)]
    original = stats[LogStatsKey(ObservationEvents.observation_original, None, group)]
    assert [value[0] for value in original] == [0, 1, 2, 0, 1]
    np.testing.assert_array_equal(np.asarray(processed), 2 * np.asarray(original))


def test_original_and_wrapped_rewards_are_reported():
    env = monitored(RewardScalingWrapper.wrap(counting_env(((3, "terminated"),)), scale=10.0))
    run_episode(env, [{"move": 1}] * 3)
    stats = env.epoch_stats.reduce()
    assert stats[LogStatsKey(RewardEvents.reward_original, None, None)] == [1.0, 2.0, 3.0]
    assert stats[LogStatsKey(RewardEvents.reward_processed, None, ("step_key_0", "agent_0"))] == [10.0, 20.0, 30.0]


def test_steps_that_a_wrapper_takes_while_it_resets_are_not_logged():
    env = monitored(RandomResetWrapper.wrap(counting_env(((9, "terminated"),)), min_skip_steps=3, max_skip_steps=3))
    run_episode(env, [{"move": 1}])
    stats = env.epoch_stats.reduce()
    assert stats[LogStatsKey(RewardEvents.reward_original, None, None)] == [4.0]
    original = stats[LogStatsKey(ObservationEvents.observation_original, None, ("step_key_0", "agent_0", "count"))]
    assert np.ravel(original).tolist() == [3, 0]


def test_only_configured_quantities_are_logged():
    interfaces = {
        "observation_logging": {ObservationEvents},
        "action_logging": {ActionEvents},
        "reward_logging": {RewardEvents},
    }
    for kind, expected in interfaces.items():
        env = counting_env(((2, "terminated"),))
        env = MazeEnvMonitoringWrapper.wrap(env, **{**dict.fromkeys(ALL, False), kind: True})
        env.reset()
        env.step({"move": 1})
        assert {record.interface_class for record in env.get_step_events()} == expected


def test_sub_steps_that_a_wrapper_answers_itself_are_logged_under_their_own_keys():
    env = monitored(StructuredCuttingEnv(cutting_env_factory()))
    env.reset()
    env.step({"piece_idx": 0})
    env.step({"cut_rotation": 1})
    env.publish_episode()
    groups = {(key.event.__name__, key.group) for key in env.epoch_stats.reduce() if key.group}
    assert ("observation_processed", ("step_key_0", "agent_0", "inventory")) in groups
    assert ("observation_processed", ("step_key_1", "agent_0", "selected_piece")) in groups
    assert ("discrete_action", ("step_key_0", "agent_0", "piece_idx")) in groups
    assert ("discrete_action", ("step_key_1", "agent_0", "cut_rotation")) in groups
    originals = [group for name, group in groups if name == "observation_original"]
    assert {group[2] for group in originals} == {"inventory", "ordered_piece"}


class AllActions(gymnasium.Env):
    """One action of each kind; ends after four steps."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), dtype=np.float32)
    action_space = spaces.Dict(
        {
            "gear": spaces.Discrete(4),
            "pair": spaces.MultiDiscrete([2, 3]),
            "lights": spaces.MultiBinary(3),
            "torque": spaces.Box(-1.0, 1.0, (2,), dtype=np.float32),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        self.n_steps += 1
        return np.full(2, 0.1 * self.n_steps, dtype=np.float32), 1.0, self.n_steps == 4, False, {}


ACTION = {
    "gear": 2,
    "pair": np.array([1, 0]),
    "lights": np.array([1, 0, 1], dtype=np.int8),
    "torque": np.array([0.5, -0.5], dtype=np.float32),
}


def test_choices_of_spaces_with_a_start_are_counted_from_zero():
    action_space = {"gear": spaces.Discrete(3, start=5), "pair": spaces.MultiDiscrete([2, 3], start=[10, 20])}
    conversions = {0: DictActionConversion(action_space)}, random_walk_env().observation_conversion_dict
    env = MazeEnvMonitoringWrapper.wrap(MazeEnv(Resting(), *conversions), **ALL)
    env.reset()
    env.step({"gear": 6, "pair": np.array([11, 22])})
    records = [r.attributes for r in env.get_step_events() if r.interface_class is ActionEvents]
    assert [(r["name"], r["value"], r["action_dim"]) for r in records] == [
        ("gear", 1, 3),
        ("pair_0", 1, 2),
        ("pair_1", 2, 3),
    ]


class Resting(RandomWalkCoreEnv):
    def step(self, maze_action):
        return self.get_maze_state(), 0.0, False, {}


def test_every_kind_of_action_becomes_the_event_that_fits_it():
    env = MazeEnvMonitoringWrapper.wrap(GymMazeEnv(AllActions()), **ALL)
    env.reset()
    env.step(ACTION)
    records = [r for r in env.get_step_events() if r.interface_class is ActionEvents]
    events = [(r.interface_method.__name__, r.attributes["name"], r.attributes["value"]) for r in records]
    discrete = [event for event in events if event[0] == "discrete_action"]
    assert discrete == [
        ("discrete_action", "gear", 2),
        ("discrete_action", "pair_0", 1),
        ("discrete_action", "pair_1", 0),
    ]
    binary = [event for event in events if event[0] == "multi_binary_action"]
    assert binary == [("multi_binary_action", "lights", 0), ("multi_binary_action", "lights", 2)]
    (continuous,) = [event for event in events if event[0] == "continuous_action"]
    assert continuous[1] == "torque"
    np.testing.assert_allclose(continuous[2], [0.5, -0.5])
    dims = [r.attributes.get("action_dim") or r.attributes.get("num_binary_actions") for r in records]
    assert [dim for dim in dims if dim] == [4, 3, 3, 2, 3]


def summaries(directory):
    """Tag and kind of everything in the event files of a directory, with the images."""
    found, images = {}, {}
    for file in sorted(directory.glob("events.out.tfevents.*")):
        for event in read_event_file(file).events:
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                found.setdefault(value.tag, set()).add(kind)
                if kind == "image":
                    images[value.tag] = np.asarray(Image.open(io.BytesIO(value.image.encoded_image_string)))
    return found, images


def test_tensorboard_shows_every_documented_distribution(tmp_path):
    env = monitored(GymMazeEnv(AllActions()))
    env.action_space.seed(1)
    with SimpleStatsLoggingSetup(env, log_dir=tmp_path):
        for _ in range(3):
            run_episode(env, [env.action_space.sample() for _ in range(4)])
    tags, images = summaries(tmp_path)
    actions, observed, rewards = "train_ActionEvents", "train_ObservationEvents", "train_RewardEvents"
    agent = "step_key_0/agent_0"
    for name in ("gear", "pair_0", "pair_1"):
        assert "image" in tags[f"{actions}/discrete_action/{agent}/{name}/figure"]
    assert "image" in tags[f"{actions}/multi_binary_action/{agent}/lights/figure"]
    assert "image" in tags[f"{actions}/continuous_action/{agent}/torque/figure"]
    for event in ("observation_original", "observation_processed"):
        assert tags[f"{observed}/{event}/{agent}/observation"] == {"histo"}
    for event in ("reward_original", f"reward_processed/{agent}"):
        assert tags[f"{rewards}/{event}"] == {"histo"}
        assert tags[f"{rewards}/{event}/figure"] == {"image"}
    assert all(image.std() > 0 for image in images.values())


def test_monitored_environments_work_in_worker_processes(tmp_path):
    def make():
        env = MazeEnvMonitoringWrapper.wrap(counting_env(((2, "terminated"),)), **ALL)
        return ObservationVisualizationWrapper.wrap(env, plot_function=draw_counts)

    envs = SubprocVectorEnv([make, make], logging_prefix="train")
    try:
        with SimpleStatsLoggingSetup(envs, log_dir=tmp_path):
            envs.reset()
            for _ in range(4):
                envs.step({"move": np.array([1, 1])})
    finally:
        envs.close()
    tags, _ = summaries(tmp_path)
    assert "image" in tags["train_ActionEvents/discrete_action/step_key_0/agent_0/move/figure"]
    assert tags["train_ObservationEvents/observation_processed/step_key_0/agent_0/count"] == {"histo"}
    assert tags["train_ObservationVisualizationEvents/observation_to_visualize/step_key_0/count/figure"] == {"image"}


def draw_counts(value, groups, **kwargs):
    """A plot function in the form of the documentation: draws one of the observations of one key."""
    import matplotlib.pyplot as plt

    step_key, obs_name = groups
    fig = None
    if step_key == "step_key_0" and obs_name == "count":
        obs = value[np.random.default_rng().integers(0, len(value))]
        fig = plt.figure(figsize=(4, 3))
        plt.subplot(1, 1, 1)
        plt.bar(range(len(np.ravel(obs))), np.ravel(obs))
    return fig


def test_observations_are_plotted_by_the_users_function_given_by_its_path(tmp_path):
    env = counting_env(((3, "terminated"),))
    config = {f"{ObservationVisualizationWrapper.__module__}.ObservationVisualizationWrapper": {"plot_function": PATH}}
    env = LogStatsWrapper.wrap(WrapperFactory.wrap_from_config(env, config), logging_prefix="train")
    with SimpleStatsLoggingSetup(env, log_dir=tmp_path):
        run_episode(env, [{"move": 1}] * 3)
    tags, images = summaries(tmp_path)
    drawn = [tag for tag in tags if "Visualization" in tag]
    assert drawn == ["train_ObservationVisualizationEvents/observation_to_visualize/step_key_0/count/figure"]
    assert images[drawn[0]].shape == (300, 400, 4)


PATH = f"{__name__}.draw_counts"


def test_the_plot_function_gets_all_observations_that_were_acted_on_in_the_epoch():
    env = ObservationVisualizationWrapper.wrap(counting_env(((3, "terminated"),)), plot_function=draw_counts)
    env = LogStatsWrapper.wrap(env)
    for _ in range(2):
        run_episode(env, [{"move": 1}] * 3)
    event = ObservationVisualizationEvents.observation_to_visualize
    samples = epoch_value(env, event, None, ("step_key_0", "count"))
    assert [value[0] for value in samples.values] == [0, 1, 2, 0, 1, 2]


def test_without_a_plot_function_nothing_is_kept():
    env = ObservationVisualizationWrapper.wrap(counting_env(((3, "terminated"),)), plot_function=None)
    env.reset()
    env.step({"move": 1})
    assert list(env.get_step_events()) == []


def test_targets_that_name_no_function_are_refused():
    with pytest.raises(ConfigError, match=r"numpy\.no_such_function"):
        ObservationVisualizationWrapper.wrap(counting_env(((3, "t"),)), plot_function="numpy.no_such_function")


STACKS = [
    lambda env: MazeEnvMonitoringWrapper.wrap(env, **ALL),
    lambda env: ObservationVisualizationWrapper.wrap(env, plot_function=draw_counts),
    StepTimingWrapper.wrap,
]


def event_values(env):
    def plain(value):
        return value.tolist() if isinstance(value, np.ndarray) else str(value)

    return [
        (r.interface_method.__name__, [plain(v) for v in r.attributes.values()])
        for r in env.get_step_events()
        if r.interface_class is not StepTimingEvents
    ]


@pytest.mark.parametrize("wrap", STACKS)
@pytest.mark.parametrize("how", ["clone", "pickle", "deepcopy"])
def test_copies_within_an_episode_continue_like_the_original(wrap, how):
    def make():
        return wrap(RewardScalingWrapper.wrap(GymMazeEnv("CartPole-v1"), scale=2.0))

    env = make()
    env.seed(1)
    env.reset()
    env.step({"action": 1})
    if how == "clone":
        other = make()
        other.reset()
        other.clone_from(env)
    else:
        other = copy.deepcopy(env) if how == "deepcopy" else pickle.loads(pickle.dumps(env))
    np.testing.assert_equal(env.step({"action": 0}), other.step({"action": 0}))
    assert event_values(env) == event_values(other)
    other.step({"action": 1})
    assert env.get_env_time() == 2


@pytest.mark.parametrize("wrap", STACKS)
def test_observing_wrappers_do_not_change_the_observations_of_the_agent(wrap):
    plain, observed = (counting_env(((3, "truncated"),)) for _ in range(2))
    observed = wrap(observed)
    for env in (plain, observed):
        env.seed(4)
    np.testing.assert_equal(plain.reset(), observed.reset())
    for move in (1, 2, 3):
        np.testing.assert_equal(plain.step({"move": move}), observed.step({"move": move}))
    state, action = plain.get_maze_state(), plain.get_maze_action()
    np.testing.assert_equal(
        plain.get_observation_and_action_dicts(state, action, True),
        observed.get_observation_and_action_dicts(state, action, True),
    )
    assert observed.action_space == plain.action_space
    assert isinstance(observed, type(plain))


def test_step_timing_reports_the_own_time_of_each_layer(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr("maze.core.wrappers.monitoring_wrapper.perf_counter", lambda: seconds[0])

    class Slow(ObservationWrapper):
        """Takes 3 milliseconds for each observation."""

        def observation(self, observation):
            seconds[0] += 0.003
            return observation

    env = StepTimingWrapper.wrap(TimeLimitWrapper.wrap(Slow(counting_env(((3, "terminated"),))), max_episode_steps=9))
    env = LogStatsWrapper.wrap(env)
    run_episode(env, [{"move": 1}] * 3)
    stats = env.epoch_stats.reduce()
    inner = type(counting_env(((1, "terminated"),))).__name__
    for layer, milliseconds in (("2_TimeLimitWrapper", 0.0), ("1_Slow", 3.0), (f"0_{inner}", 0.0)):
        timing = StepTimingEvents
        assert stats[LogStatsKey(timing.step_time, "mean_ms", (layer,))] == pytest.approx(milliseconds)
        assert stats[LogStatsKey(timing.step_time, "total_ms", (layer,))] == pytest.approx(3 * milliseconds)
        assert stats[LogStatsKey(timing.reset_time, "mean_ms", (layer,))] == pytest.approx(milliseconds)
