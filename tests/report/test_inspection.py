"""Episodes in which every decision can be looked at."""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import RecordedFramesRenderer
from maze.core.rendering.trajectory_page import write_trajectory_page
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord
from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze.distributions.beta import BetaProbabilityDistribution
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.evaluation.inspection import _temporal_differences, inspected_episode
from maze.evaluation.replay import what_if
from maze.evaluation.runners import InspectionRunner, ReplayRunner, runs_of
from maze.maze_cli import main
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from tests.api.shorter import SHORTER
from tests.report.browser import NARROW, WIDE, OpenPage, accessibility_faults, cut_off


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def steps_of(page: Path) -> list[dict[str, Any]]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    steps: list[dict[str, Any]] = json.loads(found[1])["steps"]
    return steps


class Never(Policy):
    """Cannot act on what it sees."""

    def compute_action(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("prices")


def test_temporal_differences_match_hand_worked_values() -> None:
    """r + 0.5 V(next) - V; nothing follows a terminal step, and the value of its last state a truncated one."""
    assert _temporal_differences([1.0, 1.0], [4.0, 2.0], 0.0, 0.5) == [-2.0, -1.0]
    assert _temporal_differences([1.0, 1.0], [4.0, 2.0], 6.0, 0.5) == [-2.0, 2.0]
    assert _temporal_differences([1.0, 1.0], [None, 2.0], None, 0.5) == [None, None]


def test_each_step_has_its_decisions_and_those_of_other_policies() -> None:
    env = TimeLimitWrapper.wrap(GymMazeEnv("CartPole-v1"), max_episode_steps=4)
    env.seed(1)
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    episode = inspected_episode(env, policy, {"same": policy, "never": Never()}, None, 0.99, False)
    assert len(episode.record.step_records) == 5  # the last state has no decision
    assert len(episode.decisions) == 4
    (decision,) = episode.decisions[0]
    (observation,) = decision["observation"]
    np.testing.assert_allclose(observation["values"], episode.record.step_records[0].maze_state, rtol=1e-3)
    assert decision["heads"][0]["kind"] == "action"
    assert decision["others"][1]["action"].startswith("no action: KeyError")
    assert decision["td_error"] is None


class Musing(ABC):
    """Events of a policy."""

    def considered(self, action: int) -> None:
        """The policy considers an action."""


class Muses(Policy):
    """Takes one action, and fires an event before."""

    def __init__(self, action: int) -> None:
        self.action = action

    def needs_env(self) -> bool:
        return True

    def compute_action(self, observation: Any, maze_state: Any, env: Any, *args: Any, **kwargs: Any) -> Any:
        env.context.pre_step()  # the event belongs to the coming step
        env.context.event_service.create_event_topic(Musing).considered(action=self.action)
        return {"action": self.action}


def considered(record: StateTrajectoryRecord) -> list[int]:
    """The action of each event, step by step."""
    steps = [step.step_event_log for step in record.step_records]
    events = [event for step in steps if step is not None for event in step.events.data]
    return [event.attributes["action"] for event in events if event.interface_class is Musing]


def test_the_events_of_an_episode_are_those_of_the_policy_that_acts() -> None:
    env = TimeLimitWrapper.wrap(GymMazeEnv("CartPole-v1"), max_episode_steps=4)
    env.seed(1)
    recorded = inspected_episode(env, Muses(0), {"other": Muses(1)}, None, 0.99, True).record
    assert considered(recorded) == [0, 0, 0, 0]
    assert recorded.action_record is not None
    recorded.action_record.seed = 1
    compared = what_if(env, recorded, 2, action=0, policy=Muses(1))
    assert considered(compared.recorded) == [0, 0, 0, 0]
    assert considered(compared.other) == [1, 1], "from the change on"


def train() -> Mapping[str, Any]:
    from maze.api.run_context import RunContext

    rc = RunContext(run_dir="trained", algorithm="ppo", env="CartPole-v1", overrides=SHORTER["ppo"], silent=True)
    rc.train(n_epochs=1)
    return dict(rc.policy.networks)


def test_the_command_shows_the_outputs_of_the_networks() -> None:
    (network,) = train().values()
    arguments = ("-cn", "conf_inspect", "policies=[trained,random]", "hydra.run.dir=inspected")
    assert main([*arguments, "runner.max_episode_steps=6", "runner.gamma=0.5"]) == 0
    steps = steps_of(Path("inspected/episode.html"))
    decisions = [step["decisions"][0] for step in steps[:-1]]
    assert steps[-1]["decisions"] == []
    assert all(step["picture"] is not None for step in steps), "frames are taken where gymnasium draws them"
    for decision, following in itertools.pairwise(decisions):
        assert decision["td_error"] == pytest.approx(1 + 0.5 * following["value"] - decision["value"], abs=1e-3)
        seen = torch.tensor([decision["observation"][0]["values"]], requires_grad=True)
        (head,) = decision["heads"]
        log_probs = torch.log_softmax(next(iter(network({"observation": seen}).values())), -1)[0]
        np.testing.assert_allclose(head["values"], log_probs.exp().detach(), rtol=1e-2)
        assert head["taken"] == [int(log_probs.argmax())]
        (gradient,) = torch.autograd.grad(log_probs[head["taken"][0]], seen)
        np.testing.assert_allclose(decision["observation"][0]["importance"], gradient[0].abs(), rtol=5e-2, atol=1e-5)


class Counted(GymMazeEnv):
    """Counts which of its environments are open."""

    open_envs: ClassVar[set[int]] = set()
    n_made: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__("CartPole-v1")
        Counted.n_made += 1
        self._number = Counted.n_made
        self.open_envs.add(self._number)

    def close(self) -> None:
        super().close()
        self.open_envs.discard(self._number)


def test_environments_of_all_policies_are_closed() -> None:
    cfg = OmegaConf.create({"env": {"_target_": f"{__name__}.Counted"}})
    random = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    inspected = InspectionRunner({"acts": random, "other": random}, n_episodes=2, max_episode_steps=3)
    inspected.setup(cfg)
    inspected.run()
    env = Counted()
    recording: Any = TrajectoryRecordingWrapper.wrap(env)
    recording.seed(1)
    recording.reset()
    recording.step({"action": 0})
    record = recording.episode_record
    recording.publish_trajectory()
    TrajectoryWriterFile("stored").write(record)
    env.close()
    replayed = ReplayRunner("stored", what_if={"step": 0, "policy": random}, max_episode_steps=3)
    replayed.setup(cfg)
    replayed.run()
    assert Counted.n_made >= 6
    assert not Counted.open_envs


def test_all_sub_steps_of_a_step_are_shown() -> None:
    arguments = ("-cn", "conf_inspect", "env=tutorial_cutting_2d_struct_masked", "wrappers=tutorial_cutting_2d")
    policies = "policies=[tutorial_cutting_2d_greedy,random]"
    assert main([*arguments, policies, "runner.max_episode_steps=3", "hydra.run.dir=inspected"]) == 0
    steps = steps_of(Path("inspected/episode.html"))
    assert [len(step["decisions"]) for step in steps] == [2, 2, 2, 0]
    first, second = steps[0]["decisions"]
    assert (first["actor"], second["actor"]) == ("sub-step 0, agent 0", "sub-step 1, agent 0")
    kinds = {entry["name"]: entry["kind"] for entry in first["observation"]}
    assert kinds["inventory"] == "table"
    assert kinds["inventory_mask"] == "mask"


@pytest.mark.slow
def test_steps_are_found_with_the_keyboard(open_page: OpenPage) -> None:
    arguments = ("-cn", "conf_inspect", "env.name=CartPole-v1", "policies=[dummy_cartpole,random]")
    assert main([*arguments, "runner.max_episode_steps=30", "hydra.run.dir=inspected"]) == 0
    path = Path("inspected/episode.html")
    differing = [
        index
        for index, step in enumerate(steps_of(path))
        if any(other["differs"] for decision in step["decisions"] for other in decision["others"])
    ]
    page = open_page(path)
    page.locator("#query").focus()
    page.keyboard.type("another action")
    page.keyboard.press("Enter")
    page.locator("#slider").focus()
    page.keyboard.press("n")
    assert page.locator("#position").inner_text() == f"step {differing[1]} of 30"
    assert page.locator("#matches").inner_text() == f"{len(differing)} found, this is 2"
    for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowUp", 11), ("End", 30), ("ArrowLeft", 29)):
        page.keyboard.press(key)
        assert page.locator("#position").inner_text() == f"step {step} of 30"
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    assert page.locator("#play").inner_text() == "pause"
    for _ in range(400):  # no function of ours may be waited for: the page does not allow eval
        if int(page.locator("#slider").input_value()) >= 2:
            break
        page.wait_for_timeout(25)
    assert int(page.locator("#slider").input_value()) >= 2
    page.keyboard.press(" ")
    assert page.locator("#play").inner_text() == "play"


def looked_into(env: MazeEnv[Any]) -> Path:
    """The page of an episode of an untrained network."""
    env.seed(1)
    network_inputs = {name: space.shape for name, space in env.observation_spaces_dict[0].spaces.items()}
    mapper = DistributionMapper(env.action_spaces_dict[0], [])
    logits = {name: mapper.required_logits_shape(name) for name in env.action_spaces_dict[0].spaces}
    network = FlattenConcatPolicyNet(network_inputs, logits, hidden_units=[8], non_lin="torch.nn.Tanh")
    policy, random = TorchPolicy({0: network}, mapper, "cpu"), RandomPolicy(env.action_spaces_dict)
    episode = inspected_episode(env, policy, {"random": random, "never": Never()}, None, 0.99, True)
    return write_trajectory_page(episode.record, "episode.html", decisions=episode.decisions)


class EveryKind(gymnasium.Env[Any, Any]):
    """Observations and actions of every kind."""

    observation_space = spaces.Dict(
        {
            "adjacency": spaces.Box(0, 1, (6, 14), np.float32),
            "hostile</script><img src=x>": spaces.Box(-1e38, 1e38, (3,), np.float32),
            "image": spaces.Box(0, 255, (20, 24, 3), np.uint8),
            "nodes": spaces.Box(-1, 1, (60, 3), np.float32),
        }
    )
    action_space = spaces.Dict(
        {
            "amount": spaces.Box(-2, 2, (2,), np.float32),
            "node": spaces.Discrete(3),
            "parts": spaces.MultiDiscrete([2, 3]),
            "switches": spaces.MultiBinary(4),
        }
    )

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(1)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {}


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_every_kind_of_observation_and_action_is_shown(open_page: OpenPage, width: int, scheme: str) -> None:
    path = looked_into(TimeLimitWrapper.wrap(GymMazeEnv(EveryKind()), max_episode_steps=3))
    decision = steps_of(path)[0]["decisions"][0]
    assert [head["kind"] for head in decision["heads"]] == ["density", "probabilities", "choices", "switches"]
    assert [entry["kind"] for entry in decision["observation"]] == ["table", "vector", "image", "table"]
    page = open_page(path, width=width, scheme=scheme)
    switches = page.locator(".part", has_text="action switches")
    marked = [text.split()[-1] for text in switches.locator(".bars span").all_inner_texts() if text.startswith("▸")]
    (head,) = (each for each in decision["heads"] if each["name"] == "switches")
    assert marked == [str(index) for index, is_on in enumerate(head["taken"]) if is_on]
    assert "the first 12 of 14 columns" in page.locator(".part", has_text="adjacency").inner_text()
    assert "the first 40 of 60 rows" in page.locator(".part", has_text="nodes").inner_text()
    images = page.locator("#decisions img")
    assert [image.evaluate("each => each.naturalWidth") for image in images.all()] == [24, 24]
    assert "no action" in page.locator("#decisions").inner_text()
    assert cut_off(page) == []
    assert accessibility_faults(page) == []


@pytest.mark.slow
def test_a_long_episode_renders_only_its_visible_part(open_page: OpenPage) -> None:
    """Of 10,000 steps, the page holds the elements of one, and a curve with as many points as it is wide."""
    record = StateTrajectoryRecord("long")
    rng = np.random.default_rng(1)
    for time in range(10_000):
        log = StepEventLog(time)
        record.append(StateRecord(time, 0, log, float(rng.normal()), False, {}, {}))
    decision = {
        "actor": "one",
        "heads": [],
        "observation": [],
        "others": [{"name": "o", "differs": True, "action": "a"}],
    }
    page = open_page(write_trajectory_page(record, "long.html", decisions=[[decision]] * 10_000))
    assert page.evaluate("document.querySelectorAll('*').length") < 300
    page.locator("#query").select_option(label="another action by o")
    assert page.locator("#matches").inner_text().startswith("10000 found")
    assert page.evaluate("document.querySelectorAll('*').length") < 1000
    assert page.evaluate("document.querySelector('#chart path').getAttribute('d').split('L').length") < 3000
    page.keyboard.press("End")
    assert page.locator("#position").inner_text() == "step 9999 of 9999"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "shown"), [(WIDE, [320, 600]), (NARROW, [320, None])])
def test_small_pictures_are_enlarged(open_page: OpenPage, width: int, shown: list[int | None]) -> None:
    """A frame of an old game is drawn twice as large, a large one as it is, both within the page."""
    renderer = RecordedFramesRenderer()
    record = StateTrajectoryRecord("frames", renderer)
    for time, size in enumerate([(210, 160, 3), (400, 600, 3)]):
        renderer.add(time, np.full(size, 90 * time, np.uint8))
        record.append(StateRecord(time, 0, StepEventLog(time), 0.0, False, {}, {}))
    page = open_page(write_trajectory_page(record, "frames.html"), width=width)
    picture = page.locator("#picture")
    for natural, expected in zip([160, 600], shown, strict=True):
        page.wait_for_function(  # the new picture is loaded, and the page has handled that
            "natural => { const of = document.getElementById('picture');"
            " return of.naturalWidth === natural && parseFloat(of.style.width) % natural === 0; }",
            arg=natural,
        )
        box = picture.bounding_box()
        assert box is not None
        assert box["width"] == pytest.approx(expected, abs=3) if expected else box["width"] <= width
        assert cut_off(page) == []
        page.keyboard.press("ArrowRight")


@pytest.mark.parametrize(
    ("distribution", "logits"),
    [
        (DiagonalGaussianProbabilityDistribution, [0.5, 0.1]),
        (SquashedGaussianProbabilityDistribution, [0.5, 0.1]),
        (BetaProbabilityDistribution, [1.0, 2.0]),
    ],
)
def test_the_typical_range_contains_most_samples(distribution: Any, logits: list[float]) -> None:
    """About two thirds, in the units of the action."""
    space = spaces.Box(-2.0, 6.0, (1,), np.float32)
    drawn = distribution(torch.tensor([logits] * 20_000), space)
    low, high = drawn.typical_range()
    samples = drawn.sample(torch.Generator().manual_seed(1))
    share = ((samples > low) & (samples < high)).float().mean()
    assert share == pytest.approx(0.6827, abs=0.05)


def test_arguments_of_a_policy_may_have_the_names_of_parts_of_an_entry() -> None:
    policy = {"_target_": "my_project.Mixed", "policy": 1, "runs": 2}
    assert runs_of(policy) == [{"policy": policy}]


def test_several_runs_of_one_name_are_refused() -> None:
    random = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    inspected = InspectionRunner({"acts": random, "other": {"runs": [{"policy": random}] * 2}}, n_episodes=1)
    inspected.setup(OmegaConf.create({"env": {"_target_": f"{__name__}.Counted"}}))
    with pytest.raises(ConfigError, match=r"policies\.other: expected one run, found 2"):
        inspected.run()


def test_a_discount_factor_that_is_no_number_is_refused_before_an_episode_is_played() -> None:
    with pytest.raises(ConfigError, match=r"runner\.gamma: expected a number of at least 0 and at most 1, found 'x'"):
        InspectionRunner({"acts": {}}, gamma="x")  # type: ignore[arg-type]


def test_an_inspection_without_policies_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-cn", "conf_inspect", "hydra.run.dir=inspected"]) in (1, 2)
    assert "expected policies by name" in capsys.readouterr().err
