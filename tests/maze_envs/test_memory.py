"""Recall: observations, recalled symbols, and returns of policies with and without recurrent state."""

import numpy as np
import pytest

from maze.core.errors import ConfigError
from maze.utils.check_env import check_env
from maze_envs.memory.recall import Recall, RecallEnv


def test_the_environment_is_sound():
    report = check_env(RecallEnv, n_steps=60)
    assert (report.findings, report.skipped) == ([], [])


def test_symbols_are_shown_one_by_one_and_recalled_afterwards():
    recall = Recall(2, n_items=2, n_symbols=3, delay=1)
    recall.begin(np.arange(2))
    recall.items[:] = [[2, 0], [1, 1]]
    seen, rewards, done = [], [], []
    signs = {"signs": np.zeros((2, 4), np.float32)}
    for answer in ([0, 0], [0, 0], [0, 0], [2, 0], [0, 1]):
        recall.observe(signs)
        seen.append(signs["signs"].tolist())
        reward, terminated, truncated = recall.advance({"symbol": np.array(answer)})
        rewards.append(reward.tolist())
        done.append(bool(terminated.all()))
        assert not truncated.any()
    nothing, recalled = [0.0] * 4, [0.0, 0.0, 0.0, 1.0]
    assert [row[0] for row in seen] == [[0, 0, 1, 0], [1, 0, 0, 0], nothing, recalled, recalled]
    assert [row[1] for row in seen] == [[0, 1, 0, 0], [0, 1, 0, 0], nothing, recalled, recalled]
    assert rewards == [[0, 0], [0, 0], [0, 0], [0.5, 0], [0.5, 0.5]]
    assert done == [False, False, False, False, True]


@pytest.mark.parametrize("remembers", [True, False])
def test_recall_rewards_memory_with_one_and_guessing_with_chance(remembers):
    env = RecallEnv(n_items=2, n_symbols=4, delay=1)
    env.seed(0)
    returns = []
    for _ in range(200):
        observation, done, shown, total = env.reset(), False, [], 0.0
        while not done:
            signs = observation["signs"]
            if signs[:-1].any():
                shown.append(int(signs[:-1].argmax()))
            answer = shown.pop(0) if remembers and signs[-1] else 1
            observation, reward, done, _ = env.step({"symbol": answer})
            total += reward
        returns.append(total)
    assert np.mean(returns) == (1.0 if remembers else pytest.approx(0.25, abs=0.06))


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="n_symbols"):
        RecallEnv(n_symbols=1)
