"""Drift guard: the index by hand, detected drift, observations outside the training's range."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import gymnasium as gym
import httpx
import numpy as np
import pytest
from scipy.signal import lfilter

from maze.core.errors import ConfigError
from maze.serve.client import PolicyClient, ServerError
from maze.serve.drift import DriftGuard, DriftLimits, population_stability_index, summary
from maze.serve.served import Settings
from maze.serve.server import fallback_of
from tests.serve.serving import always, cartpole_observations, metrics_of, served


def test_the_population_stability_index_follows_its_formula() -> None:
    # (0.6 - 0.5) ln(0.6 / 0.5) + (0.4 - 0.5) ln(0.4 / 0.5)
    expected = 0.1 * math.log(1.2) - 0.1 * math.log(0.8)
    assert population_stability_index(np.array([0.5, 0.5]), np.array([0.6, 0.4])) == pytest.approx(expected)
    assert population_stability_index(np.array([0.2, 0.8]), np.array([0.2, 0.8])) == 0.0
    # an empty bin counts as a share of 0.0001
    empty = (0.5 - 1e-4) * math.log(0.5 / 1e-4) + (0.5 - 1.0) * math.log(0.5)
    assert population_stability_index(np.array([1e-4, 1.0]), np.array([0.5, 0.5])) == pytest.approx(empty)
    both = population_stability_index(np.array([[0.5, 0.5], [0.2, 0.8]]), np.array([[0.6, 0.4], [0.2, 0.8]]))
    assert both == pytest.approx([expected, 0.0])


RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(size=(5000, 3))
CHOICES = RNG.choice([2, 3, 7], p=[0.5, 0.3, 0.2], size=(5000, 1))
PICTURES = RNG.normal(size=(500, 10, 10))


def guard(**limits: float) -> DriftGuard:
    features = np.stack([[each.mean(), each.std(), each.min(), each.max()] for each in PICTURES])
    entries = {
        "numbers": summary(NUMBERS, False),
        "choice": summary(CHOICES, False),
        "picture": summary(features, True),
    }
    return DriftGuard("p", {0: entries}, DriftLimits(window=2000, at_least=500, **limits))


def observation(shift: float = 0.0, choice: int | None = None, brightness: float = 0.0) -> dict[str, np.ndarray]:
    chosen = RNG.choice([2, 3, 7], p=[0.5, 0.3, 0.2], size=1) if choice is None else np.array([choice])
    return {
        "numbers": RNG.normal([0.0, shift, 0.0]),
        "choice": chosen,
        "picture": RNG.normal(size=(10, 10)) + brightness,
    }


def test_the_same_population_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    watching = guard()
    for n in range(2000):
        watching.add(0, observation())
        if n == 400:
            watching.check()
            assert watching.entries == [], "too few say nothing"
    watching.check()
    assert {entry.entry for entry in watching.entries} == {"numbers", "choice", "picture"}
    assert all(entry.psi < 0.1 and entry.out_of_range < 0.01 for entry in watching.entries)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changed", "entry", "component"),
    [({"shift": 0.8}, "numbers", "1"), ({"choice": 3}, "choice", "0"), ({"brightness": 1.0}, "picture", "mean")],
)
def test_another_population_is_warned_about_once_until_it_is_in_order_again(
    changed: dict[str, float], entry: str, component: str, caplog: pytest.LogCaptureFixture
) -> None:
    watching = guard()
    for _ in range(2):
        for _ in range(1000):
            watching.add(0, observation(**changed))
        watching.check()
    found = {each.entry: each for each in watching.entries}
    assert found[entry].psi > 0.25
    assert found[entry].component == component
    assert caplog.text.count(f"Entry `{entry}`") == 1
    for _ in range(2000):
        watching.add(0, observation())
    watching.check()
    for _ in range(2000):
        watching.add(0, observation(**changed))
    watching.check()
    assert caplog.text.count(f"Entry `{entry}`") == 2


# -- autocorrelated observations --------------------------------------------------------------------------------------


def autoregressive(n: int, seed: int, correlation: float = 0.99) -> np.ndarray:
    """A component with mean 0 and deviation 1, which forgets slowly."""
    noise = np.random.default_rng(seed).normal(size=n)
    noise[1:] *= math.sqrt(1 - correlation**2)
    return lfilter([1.0], [1.0, -correlation], noise)[:, None]


def balancing(n: int, seed: int) -> np.ndarray:
    """A CartPole that never falls: 500 steps in an episode resemble each other."""
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    seen = []
    while len(seen) < n:
        seen.append(observation)
        position, speed, angle, turn = observation
        observation, _, is_terminated, is_truncated, _ = env.step(
            int(angle + 0.3 * turn + 0.02 * position + 0.05 * speed > 0)
        )
        assert not is_terminated
        if is_truncated:
            observation, _ = env.reset()
    return np.array(seen)


def n_until_warned(training: np.ndarray, work: np.ndarray) -> int | None:
    """Number of observations until a warning; the guard is checked as often as by the server."""
    watching, limits = DriftGuard("p", {0: {"all": summary(training, False)}}), DriftLimits()
    for n, row in enumerate(work, 1):
        watching.add(0, {"all": row})
        if n % 500 == 0:
            watching.check()
            if any(each.psi > limits.psi or each.out_of_range > limits.out_of_range for each in watching.entries):
                return n
    return None


@pytest.mark.parametrize("observed", [autoregressive, balancing])
@pytest.mark.parametrize("n_training", [2000, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_autocorrelated_observations_are_not_warned_about_without_drift(
    observed: Callable[[int, int], np.ndarray], n_training: int, seed: int
) -> None:
    assert n_until_warned(observed(n_training, seed), observed(15_000, 100 + seed)) is None


def test_autocorrelated_observations_that_drift_are_warned_about() -> None:
    for seed in range(3):
        assert n_until_warned(autoregressive(5000, seed), autoregressive(30_000, 100 + seed) + 3.0) is not None
        tilted = balancing(10_000, 100 + seed) + np.array([0.0, 0.0, 0.1, 0.0])
        found = n_until_warned(balancing(2000, seed), tilted)
        assert found is not None
        assert found <= 5000


def test_an_unknown_category_and_a_value_far_away_are_out_of_range() -> None:
    watching = guard(out_of_range=0.0)
    assert watching.outside(0, observation()) == ""
    far = observation()
    far["numbers"][2] = 50.0
    assert watching.outside(0, far) == (
        "1 of 8 values of the observation lie outside the range of the training, 1 of them in `numbers`."
    )
    assert "`choice`" in watching.outside(0, observation(choice=9))
    assert watching.outside(0, observation(choice=5)) == "", "a whole number between those of the training"
    assert guard(out_of_range=0.2).outside(0, far) == ""
    assert watching.outside("unknown", far) == ""


@pytest.mark.parametrize("towards", [0.0, 1.0])
def test_constants_of_the_training_may_differ_by_rounding(towards: float) -> None:
    constant = np.float32(0.3)
    guarded = DriftGuard("p", {0: {"constant": summary(np.full((1000, 1), constant), False)}})
    rounded = {"constant": np.full(1, np.nextafter(constant, np.float32(towards)))}
    for _ in range(600):
        guarded.add(0, rounded)
    guarded.check()
    (found,) = guarded.entries
    assert found.psi < 0.01
    assert found.out_of_range == 0.0
    assert guarded.outside(0, rounded) == ""
    assert guarded.outside(0, {"constant": np.full(1, np.float32(0.3001))})


def test_limits_are_checked() -> None:
    for wrong in ({"psi": -1.0}, {"out_of_range": float("nan")}, {"window": 10, "at_least": 20}):
        with pytest.raises(ConfigError, match="drift"):
            DriftLimits(**wrong)  # type: ignore[arg-type]


USUAL, FAR = [0.01, -0.02, 0.03, 0.04], [40.0, -0.02, 0.03, 0.04]


def test_an_observation_outside_its_space_is_refused_on_request() -> None:
    with served({"p": always(0)}, settings=Settings(on_drift="refuse")) as (url, _), PolicyClient(url) as client:
        assert client.act(USUAL).action == 0
        with pytest.raises(ServerError, match="1 of 4 values of the observation lie outside") as refused:
            client.act(FAR)
        assert (refused.value.status, refused.value.code) == (422, "out_of_distribution")
        with client.session() as session:
            session.act(USUAL)
            with pytest.raises(ServerError, match="outside"):
                session.act(FAR)
            assert session.act(USUAL).action == 0, "the episode goes on"
        assert metrics_of(httpx.get(f"{url}/metrics").text)['maze_events_total{event="refused"}'] == 2


def to_the_left(entries: dict[str, np.ndarray], actor: tuple[int, int]) -> dict[str, int]:
    assert entries["observation"].shape == (4,)
    assert actor == (0, 0)
    return {"action": 0}


@pytest.mark.parametrize(
    ("name", "action"),
    [(f"{__name__}:to_the_left", 0), ("maze.core.agent.dummy_cartpole_policy:DummyCartPolePolicy", 1)],
)
def test_a_named_heuristic_acts_on_drifted_observations_on_request(name: str, action: int) -> None:
    settings = Settings(on_drift="fallback", fallback=fallback_of(name))
    with served({"p": always(1 - action)}, settings=settings) as (url, _), PolicyClient(url) as client:
        assert client.act(USUAL).policy == "p"
        answer = client.act(FAR)
        assert (answer.policy, answer.action) == ("fallback", action)
        with client.session() as session:
            assert [session.act(each).policy for each in (USUAL, FAR, USUAL)] == ["p", "fallback", "p"]


@pytest.mark.parametrize("name", ["nowhere:f", "maze.serve.drift:LEVELS", "maze.serve.drift:FEATURES", "f"])
def test_a_fallback_that_cannot_be_used_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=name.partition(":")[0]):
        fallback_of(name)


def test_drift_is_exposed_as_metrics_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    limits = DriftLimits(window=200, at_least=100)
    with served({"p": always(0)}, settings=Settings(drift=limits)) as (url, application), PolicyClient(url) as client:
        application.drift_seconds = 0.05
        shifted = [[value + 1.0 for value in each] for each in cartpole_observations(200)]
        client.act_many(shifted)
        name = 'maze_drift_psi{entry="observation",policy="p",step="0"}'
        for _ in range(200):
            metrics = metrics_of(httpx.get(f"{url}/metrics").text)
            if name in metrics:
                break
            httpx.get(f"{url}/health")
        assert metrics[name] > 0.25
        assert metrics[name.replace("psi", "out_of_range")] > 0.1
        assert client.policies()[0]["drift"][0]["entry"] == "observation"
    assert [record.levelno for record in caplog.records if "differ from those of the training" in record.message] == [
        logging.WARNING
    ]
