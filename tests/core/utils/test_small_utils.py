"""Seeds, running statistics, structured spaces, annotations, renderer arguments."""

import logging
import random

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from maze.core.annotations import override, unused
from maze.core.env.structured_env import StructuredEnv
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.utils.seeding import MazeSeeding, set_seeds_globally
from maze.core.utils.stats_utils import CumulativeMovingMeanStd
from maze.core.utils.structured_env_utils import flat_structured_shapes, flat_structured_space
from maze.core.wrappers.wrapper import Wrapper


def drawn(seeding):
    return [seeding.generate_env_instance_seed() for _ in range(3)], [
        seeding.generate_agent_instance_seed() for _ in range(3)
    ]


def test_the_same_two_seeds_give_the_same_seeds_and_environments_do_not_depend_on_agents():
    first = drawn(MazeSeeding(1, 2, False))
    assert first == drawn(MazeSeeding(1, 2, False))
    assert first[0] == drawn(MazeSeeding(1, 3, False))[0]
    assert first[1] == drawn(MazeSeeding(3, 2, False))[1]
    assert len({*first[0], *first[1]}) == 6


def test_missing_seeds_are_generated_and_recorded():
    seeding = MazeSeeding(None, None, True)
    assert seeding.env_global_seed != MazeSeeding(None, None, True).env_global_seed
    again = MazeSeeding(seeding.env_global_seed, seeding.agent_global_seed, True)
    assert drawn(seeding) == drawn(again)
    assert again.cudnn_determinism_flag


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "1", True])
def test_impossible_seeds_are_refused(seed):
    with pytest.raises(ConfigError, match=r"seeding\.env_base_seed must be"):
        MazeSeeding(seed, 1, False)


def test_global_seeds_reach_all_three_generators(caplog):
    torch = pytest.importorskip("torch")

    def numbers():
        with caplog.at_level(logging.INFO):
            set_seeds_globally(5, set_cudnn_determinism=False, info_txt="a test")
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        assert numbers() == numbers()
    finally:
        random.setstate(state[0]), np.random.set_state(state[1]), torch.set_rng_state(state[2])  # noqa: NPY002
    assert "a test" in caplog.text


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), min_size=1, max_size=5))
def test_running_statistics_equal_those_of_all_data_at_once(batches):
    running = CumulativeMovingMeanStd(epsilon=1e-20)
    for batch in batches:
        running.update(np.array(batch))
    everything = np.concatenate([np.array(batch) for batch in batches])
    assert running.mean == pytest.approx(everything.mean(), abs=1e-6)
    assert running.std == pytest.approx(everything.std(), abs=1e-4)


def test_running_statistics_take_single_numbers_and_keep_other_axes_apart():
    running = CumulativeMovingMeanStd()
    for value in (1.0, 3.0):
        running.update(value)
    assert running.mean == pytest.approx(2.0)
    assert running.std == pytest.approx(1.0)
    running = CumulativeMovingMeanStd()
    running.update(np.array([[1.0, 10.0], [3.0, 30.0]]))
    running.update(np.empty((0, 2)))
    np.testing.assert_allclose(running.mean, [2.0, 20.0])
    np.testing.assert_allclose(running.std, [1.0, 10.0])


def test_sub_steps_are_joined_and_conflicts_named():
    box, number = spaces.Box(0, 1, (2,)), spaces.Discrete(3)
    joint = flat_structured_space({0: spaces.Dict(a=box), "b": spaces.Dict(a=box, c=number)})
    assert joint == spaces.Dict(a=box, c=number)
    assert flat_structured_shapes({0: {"a": (2,)}, 1: {"a": (2,), "b": ()}}) == {"a": (2,), "b": ()}
    with pytest.raises(EnvironmentContractError, match="`a` of sub-step 1"):
        flat_structured_space({0: spaces.Dict(a=box), 1: spaces.Dict(a=number)})


def test_override_checks_the_name_and_changes_nothing():
    def actor_id(self):
        """Kept."""

    assert override(StructuredEnv)(actor_id) is actor_id

    def env(self): ...

    assert override(Wrapper[int])(property(env)).fget is env

    def actor_ids(self): ...

    with pytest.raises(NameError, match=r"StructuredEnv has no member `actor_ids`. Did you mean `actor_id`"):
        override(StructuredEnv)(actor_ids)
    assert unused(1, 2) is None
