"""Compare policy bundles with their policies on recorded states.

For each case a policy is trained for a moment, exported, and loaded from the file. Then the trained policy acts in its
environment, and the bundle is shown what the raw environment shows, one observation after the other:

* `actions`: recorded states in which the most probable actions differ (of continuous ones: by more than 1e-5 of their
  range), as the raw environment takes them;
* `logits`: by how much they differ at most, relative to the largest of their row where that is above one;
* `draws`: p-value of a chi-square test that what both draw with the same seed, in a few of the states, has the same
  distribution (smallest over states, heads and components, times their number).

    python -m benchmarks.bundle_equality [--states 10000] [--epochs 3] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.wrappers.wrapper import ActionWrapper
from maze.maze_cli import main as maze_run
from maze.perception.blocks.recurrent.recurrent_cell import StepRun
from maze.serve.bundle import PolicyBundle
from maze.serve.export import tapped
from maze.serve.wrappers_as_data import Operations, operations_of

STACK_OF_4 = "+wrappers.ObservationStackWrapper.stack_config=[{observation: observation, stack_steps: 4}]"
PENDULUM = ("env.name=Pendulum-v1", "wrappers=vector_obs", "model=vector_obs")
MAPPER = "[{{action_space: Box, distribution: maze.distributions.{}ProbabilityDistribution}}]"
CASES: dict[str, Sequence[str]] = {
    "CartPole": ("env.name=CartPole-v1", "algorithm=a2c"),
    "LunarLander, normalised, 4 stacked": (
        "env.name=LunarLander-v3",
        STACK_OF_4,
        "+wrappers.ObservationNormalizationWrapper.default_strategy=MeanZeroStdOneObservationNormalizationStrategy",
        "+wrappers.ObservationNormalizationWrapper.default_strategy_config.axis=0",
        "+wrappers.ObservationNormalizationWrapper.sampling_policy._target_=maze.core.agent.random_policy.RandomPolicy",
        "algorithm=a2c",
    ),
    "cutting-2D, masked": (
        "env=tutorial_cutting_2d_struct_masked",
        "wrappers=tutorial_cutting_2d",
        "model=auto",
        "algorithm=a2c",
    ),
    "pixels": (
        "env.name=CarRacing-v3",
        "+env.continuous=false",
        "+env.max_episode_steps=100",  # instead of 1,000, which the evaluation plays
        "wrappers=pixel_obs",
        "model=pixel_obs",
        "algorithm=a2c",
    ),
    "recurrent": ("env.name=CartPole-v1", STACK_OF_4, "model=vector_obs_rnn", "algorithm=a2c"),
    "carried states": ("env.name=CartPole-v1", "model=auto", "model.recurrence=carried", "algorithm=ppo"),
    "Beta": (
        *PENDULUM,
        f"model.distribution_mapper_config={MAPPER.format('beta.Beta')}",
        "algorithm=a2c",
    ),
    "squashed Gaussian": (
        *PENDULUM,
        f"model.distribution_mapper_config={MAPPER.format('squashed_gaussian.SquashedGaussian')}",
        "algorithm=a2c",
    ),
}
"""Arguments of the training by name of the case."""
TRUSTED = ("tutorial_maze_env",)
N_DRAWS, N_DRAWN_STATES, N_BINS = 4000, 5, 8


class Difference(NamedTuple):
    """Differences between bundle and policy."""

    n_states: int
    n_actions: int
    logits: float
    draws: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    print(f"{'case':<36}{'states':>8}{'actions':>9}{'logits':>10}{'draws':>8}{'MB':>7}{'seconds':>9}")
    for name in arguments.only:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            run = trained(name, Path(directory) / "run", arguments.epochs)
            path = PolicyBundle.from_run(run, trusted_packages=TRUSTED).save(Path(directory) / "policy.maze")
            difference = compared(PolicyBundle.load(path), run, arguments.states)
            size = path.stat().st_size / 1e6
        print(
            f"{name:<36}{difference.n_states:>8}{difference.n_actions:>9}{difference.logits:>10.1e}"
            f"{difference.draws:>8.3f}{size:>7.2f}{time.perf_counter() - begin:>9.0f}",
            flush=True,
        )


def trained(name: str, run: Path, n_epochs: int = 1) -> Path:
    """Train the policy of a case for a moment.

    :param name: Of the case.
    :param run: Where to.
    :param n_epochs: For how long.
    """
    short = (f"algorithm.n_epochs={n_epochs}", "algorithm.epoch_length=5", "algorithm.n_rollout_steps=16")
    few = ("runner.concurrency=2", "algorithm.rollout_evaluator.n_episodes=1", "runner.normalization_samples=500")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = maze_run(["-cn", "conf_train", *CASES[name], *short, *few, f"hydra.run.dir={run}"])
    if status:
        raise RuntimeError(f"{name}: the training failed. {output.getvalue()[-2000:]}")
    return run


def loaded(run: Path) -> tuple[Any, TorchPolicy]:
    """Environment and policy of a run, as they were trained."""
    from maze.core.rollout.rollout_runner import RolloutRunner
    from maze.core.utils.stored_config import StoredRun

    stored = StoredRun(run, TRUSTED).deployed("cpu", "state_dict.pt")
    env, policy = RolloutRunner.init_env_and_agent(stored.env, stored.wrappers or {}, 0, stored.policy, str(run))
    assert isinstance(policy, TorchPolicy), "what a run stores"
    return env, policy


def raw_action(action: Any, operations: Operations, actor: ActorID) -> Any:
    """Convert a policy's action to one of the raw environment, by the environment's own wrappers."""
    for wrapper in reversed(operations.chain):
        if issubclass(type(wrapper), ActionWrapper):
            action = wrapper.action(action)
    base = operations.environment
    if not issubclass(type(base), MazeEnv):
        return action
    action = action if base.step_path.clip is None else base.step_path.clip(action)
    if operations.actions[actor.step_key][-1]["kind"] == "converted":
        return action
    return base.action_conversion_dict[actor.step_key].space_to_maze(action, base.get_maze_state())


def compared(bundle: PolicyBundle, run: Path, n_states: int, seed: int = 1) -> Difference:
    """Let the trained policy act and pass its observations to the bundle.

    :param bundle: Made of the run.
    :param run: The run.
    :param n_states: Number of states.
    :param seed: Of environment and policy; another than that of the export.
    """
    env, policy = loaded(run)
    operations = operations_of(env)
    with tapped(env, operations) as (env, tap):
        return _compared(bundle, env, tap, operations, policy, n_states, seed)


def _compared(
    bundle: PolicyBundle, env: Any, tap: Any, operations: Any, policy: TorchPolicy, n_states: int, seed: int
) -> Difference:
    session = bundle.session()
    env.seed(seed)
    policy.seed(seed)
    n_actions, worst, draws, is_done, observation = 0, 0.0, [], True, {}
    for index in range(n_states):
        if is_done:
            observation = env.reset()
            session.reset()
        actor = env.actor_id()
        step = bundle.step(actor.step_key)
        is_raw = step.observation_kind != "converted"
        shown = operations.environment.get_maze_state() if is_raw else tap.entries
        inputs = session.prepare(shown, actor)
        assert inputs is not None, "no case skips steps"
        states = {key: value[None] for key, value in session.states.items()}
        answer = bundle.act_batch(actor.step_key, {key: value[None] for key, value in inputs.items()}, states=states)
        session.states = answer.states_of(0)
        batch = {key: np.asarray(value)[None] for key, value in observation.items()}
        with torch.inference_mode(), policy.remembering(env, actor):
            output = policy.compute_substep_policy_output(dict(batch), actor)
        worst = max(
            worst, *(relative(answer.logits[head], logits.numpy()) for head, logits in output.action_logits.items())
        )
        expected: Any = policy.compute_action(observation, env=env, actor_id=actor, deterministic=True)
        n_actions += not same(session.finish(answer.row(0)), raw_action(expected, operations, actor))
        if index % max(1, n_states // N_DRAWN_STATES) == 0:
            draws += draw_p_values(bundle, policy, actor, batch, inputs, states, seed + index)
        observation, _, is_done, _ = env.step(policy.compute_action(observation, env=env, actor_id=actor))
    env.close()
    return Difference(n_states, n_actions, worst, min(1.0, min(draws) * len(draws)))


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference; masked logits have to be masked on both sides."""
    masked = expected <= np.finfo(np.float32).min / 2
    if not (masked == (found <= np.finfo(np.float32).min / 2)).all():
        return np.inf
    size = max(1.0, float(np.abs(expected[~masked]).max()))
    return float(np.abs(found[~masked] - expected[~masked]).max()) / size


def same(found: Any, expected: Any) -> bool:
    """Whether actions are the same; continuous ones up to rounding."""
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return (
        np.allclose(found, expected, rtol=1e-5, atol=1e-5)
        if expected.dtype.kind == "f"
        else bool((found == expected).all())
    )


def draw_p_values(
    bundle: PolicyBundle, policy: TorchPolicy, actor: Any, batch: Any, inputs: Any, states: Any, seed: int
) -> list[float]:
    """Sample many actions of both in one state and compare their frequencies."""
    run = StepRun({key: torch.from_numpy(array) for key, array in states.items()})
    with torch.inference_mode(), policy.running_for(actor, run):
        logits = policy.compute_substep_policy_output(dict(batch), actor).action_logits
        # by torch's own distributions, which share nothing with those of the bundle
        many = {head: values.repeat_interleave(N_DRAWS, 0) for head, values in logits.items()}
        torch.manual_seed(seed)
        distribution = policy.distribution_mapper.logits_dict_to_distribution(many, 1.0)
        trained_draws = {head: value.numpy() for head, value in distribution.sample().items()}
    own, rng = {key: value[None] for key, value in inputs.items()}, np.random.default_rng(seed)
    answer = bundle.act_batch(actor.step_key, own, deterministic=False, rngs=rng, states=states)
    own_logits = {head: np.repeat(values, N_DRAWS - 1, axis=0) for head, values in answer.logits.items()}
    others = bundle.step(actor.step_key).chosen(own_logits, rng, 1.0)
    drawn = {head: np.concatenate([action, others[head]]) for head, action in answer.actions.items()}
    values = []
    for head, expected in trained_draws.items():
        pairs = zip(drawn[head].reshape(N_DRAWS, -1).T, expected.reshape(N_DRAWS, -1).T, strict=True)
        values += [chi_square(found, component) for found, component in pairs]
    return values


def chi_square(one: np.ndarray, other: np.ndarray) -> float:
    """The p-value of two samples being of one distribution; real numbers are counted in bins."""
    if one.dtype.kind == "f":
        edges = np.unique(np.quantile(np.concatenate([one, other]), np.linspace(0, 1, N_BINS + 1)[1:-1]))
        one, other = np.searchsorted(edges, one), np.searchsorted(edges, other)
    n_values = int(max(one.max(), other.max())) + 1
    table = np.stack([np.bincount(sample.astype(np.int64), minlength=n_values) for sample in (one, other)])
    table = table[:, table.sum(0) >= 10]
    return 1.0 if table.shape[1] < 2 else float(stats.chi2_contingency(table).pvalue)


if __name__ == "__main__":
    main()
