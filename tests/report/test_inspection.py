"""Episodes in which every decision can be looked at."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.maze_cli import main
from maze.report.inspection import _temporal_differences, inspected_episode
from tests.api.shorter import SHORTER
from tests.report.browser import needs_browser, opened, result_of


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


def test_temporal_differences_by_hand() -> None:
    """r + 0.5 V(next) - V; nothing follows a terminal step, and the value of its last state a truncated one."""
    assert _temporal_differences([1.0, 1.0], [4.0, 2.0], 0.0, 0.5) == [-2.0, -1.0]
    assert _temporal_differences([1.0, 1.0], [4.0, 2.0], 6.0, 0.5) == [-2.0, 2.0]
    assert _temporal_differences([1.0, 1.0], [None, 2.0], None, 0.5) == [None, None]


def test_each_step_has_its_decisions_and_other_policies_are_asked() -> None:
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
    assert decision["others"][1]["action"].startswith("cannot say: KeyError")
    assert decision["td_error"] is None


def train() -> Mapping[str, Any]:
    from maze.api.run_context import RunContext

    rc = RunContext(run_dir="trained", algorithm="ppo", env="CartPole-v1", overrides=SHORTER["ppo"], silent=True)
    rc.train(n_epochs=1)
    return dict(rc.policy.networks)


def test_the_command_shows_what_the_networks_say() -> None:
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


@needs_browser
def test_steps_are_found_with_the_keyboard() -> None:
    arguments = ("-cn", "conf_inspect", "env.name=CartPole-v1", "policies=[dummy_cartpole,random]")
    assert main([*arguments, "runner.max_episode_steps=30", "hydra.run.dir=inspected"]) == 0
    page = Path("inspected/episode.html").absolute()
    differing = [
        index
        for index, step in enumerate(steps_of(page))
        if any(other["differs"] for decision in step["decisions"] for other in decision["others"])
    ]
    script = """
        const query = document.getElementById("query");
        query.value = [...query.options].find(option => option.textContent.includes("another action")).value;
        query.dispatchEvent(new Event("change"));
        document.dispatchEvent(new KeyboardEvent("keydown", {key: "n"}));
        return document.getElementById("position").textContent + ", " + document.getElementById("matches").textContent;
    """
    expected = f"step {differing[1]} of 30, {len(differing)} found, this is 2"
    assert result_of(opened(page, script)) == expected


def test_nobody_acts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-cn", "conf_inspect", "hydra.run.dir=inspected"]) in (1, 2)
    assert "expected the policy that acts" in capsys.readouterr().err
