from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from maze.core.env.faults import Seeding
from maze.core.env.structured_env import ActorID
from maze.core.errors import NonFiniteError
from maze.core.rollout.rollout_columns import FinalObservationEntry, RolloutColumns, substeps_per_step

OBSERVATION = spaces.Dict(
    {"image": spaces.Box(0, 255, (2, 2), np.uint8), "vector": spaces.Box(-1, 1, (3,), np.float32)}
)
ACTION = spaces.Dict({"kind": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,), np.float32)})


def unseeded(env_index: int, ticks_ago: int) -> None:
    """The environments were not seeded."""


def filled(n_ticks: int = 4) -> RolloutColumns:
    columns = RolloutColumns({0: OBSERVATION}, {0: ACTION}, 2, n_ticks, {0: {"kind": (3,), "force": (4,)}})
    for tick in range(n_ticks):
        columns.substeps[0].add_row(tick, None, [0, 0])
    actor = ActorID(0, 0)
    columns.finish([actor, actor], [actor] * n_ticks)
    return columns


def test_arrays_have_the_dtypes_and_shapes_of_the_spaces_and_one_more_row_for_the_last_observation():
    substep = filled().substeps[0]
    assert substep.observations["image"].dtype == np.uint8
    assert substep.observations["image"].shape == (5, 2, 2, 2)
    assert substep.actions["kind"].dtype == np.int64
    assert substep.actions["force"].shape == (4, 2, 2)
    assert substep.logits["force"].shape == (4, 2, 4)
    assert list(substep.observations) == list(OBSERVATION)


def test_rows_are_views_that_are_made_once():
    columns = filled()
    row = columns.substeps[0].observation_rows[2]
    row["vector"][1] = 7.0
    np.testing.assert_array_equal(columns.substeps[0].observations["vector"][2, 1], [7, 7, 7])
    assert columns.substeps[0].observation_rows[2] is row


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (lambda c: c.rewards, "environment 1, tick 2 of 4 .* reward is nan"),
        (
            lambda c: c.substeps[0].observations["vector"],
            r"environment 1, tick 2 of 4.*`vector` \(sub-step 0, index \[0\]",
        ),
        (lambda c: c.substeps[0].logits["kind"], r"environment 1, tick 2 of 4.*logits of action `kind`"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_first_number_that_is_not_finite_is_named(place, expected, value):
    columns = filled()
    columns.check_finite(unseeded)
    place(columns)[2, 1, ...][()] = value
    with pytest.raises(NonFiniteError, match=expected.replace("nan", "(nan|inf)")):
        columns.check_finite(unseeded)


def test_seed_of_the_episode_is_named_if_known():
    columns = filled()
    columns.rewards[2, 1] = np.nan
    requested = []

    def seeding_at(env_index, ticks_ago):
        requested.append((env_index, ticks_ago))
        return Seeding(1234, 56)

    with pytest.raises(NonFiniteError, match=r"environment 1, tick 2 .*56 ticks after it was seeded with 1234\)"):
        columns.check_finite(seeding_at)
    assert requested == [(1, columns.n_ticks - 2)]


def test_the_observation_after_the_rollout_and_final_observations_are_checked_too():
    columns = filled()
    columns.substeps[0].observations["vector"][4, 0, 2] = np.nan
    with pytest.raises(NonFiniteError, match=r"environment 0, the end of the rollout.*index \[2\]"):
        columns.check_finite(unseeded)
    columns = filled()
    observation = {"image": np.zeros((2, 2), np.uint8), "vector": np.array([0, np.inf, 0], np.float32)}
    columns.final_observations.append(FinalObservationEntry(3, 1, ActorID(0, 0), observation))
    with pytest.raises(NonFiniteError, match=r"environment 1, tick 3 .*final observation `vector`"):
        columns.check_finite(unseeded)


def test_contents_of_invalid_entries_have_no_effect():
    columns = RolloutColumns({"a": OBSERVATION, "b": OBSERVATION}, {"a": ACTION, "b": ACTION}, 2, 1)
    columns.substeps["a"].add_row(0, [0], [0])
    columns.substeps["b"].add_row(0, [1], [0])
    columns.finish([ActorID("a", 0), ActorID("a", 0)], [None])
    columns.substeps["a"].observations["vector"][0, 1] = np.nan
    columns.substeps["b"].observations["vector"][1] = np.nan
    columns.check_finite(unseeded)
    columns.substeps["a"].observations["vector"][0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="environment 0, tick 0"):
        columns.check_finite(unseeded)


def test_sub_steps_of_a_step():
    assert substeps_per_step({0: 1}) == 1
    assert substeps_per_step({"a": 2, "b": 1}) == 3
    assert substeps_per_step({"agent": -1}) == 1
