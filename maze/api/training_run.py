"""One training run of a RunContext: built, trained, and used; rollouts, and their statistics as a table."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from maze.api.config_auditor import place
from maze.api.config_loader import LoadedRun
from maze.api.utils import GlobalGenerators, InvalidSpecificationError, RunContextError, check_names, output
from maze.cli import run_summary
from maze.cli.hydra_setup import hydra_config
from maze.cli.run_directory import CLAIM, claim_directory
from maze.cli.stored_runs import use_stored_run
from maze.console.runs import EVERYTHING, QUIET, checked_verbosity
from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.serialized_torch_policy import SerializedTorchPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.space_values import check_entries, dict_specs
from maze.core.errors import ConfigError
from maze.core.log_stats import log_stats
from maze.core.log_stats.log_stats_writer_console import LogStatsWriterConsole
from maze.core.log_stats.stats_format import name_parts, sample_values, scalar_value
from maze.core.rollout.recording import EVENT_LOG_DIR, PAGE_DIR, TRAJECTORY_DIR
from maze.core.utils.config_utils import EnvFactory, config_to_yaml, shown_value, whole_number
from maze.core.utils.factory import Factory
from maze.core.utils.files import Uploads, inside_directory, uploaded, write_whole
from maze.core.utils.import_guard import imports_guarded
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    make_normalized_env_factory,
    statistics_of_run,
)
from maze.core.wrappers.return_normalization_reward_wrapper import FrozenEnvFactory
from maze.core.wrappers.time_limit_wrapper import time_limited
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection, best_score
from maze.train.utils.run_process import EpochSummary
from maze.utils.process import one_numpy_thread

if TYPE_CHECKING:
    import pandas as pd

    from maze.core.agent.torch_policy import TorchPolicy
    from maze.evaluation.comparison import Comparison

COMPARISON_DIR = "comparison"
"""Directory of comparisons, in the directory of the training run."""

EVALUATION_EPISODES = 8
"""Number of evaluation episodes if neither the caller nor the algorithm's configuration states it."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    :param number: Number of the run in a multirun, from 0.
    :param env_base_seed: Seed of the environments' seeds.
    :param agent_base_seed: Seed of the policies' seeds.
    :param run_dir: Directory of the run; `None`: it was not created so far.
    :param error: Type and message of the error that ended the run; `None`: there was none.
    """

    number: int
    overrides: Mapping[str, Any]
    """Values that distinguish the run from the others."""
    status: str = "not trained"
    """`not trained`, `completed` or `failed`."""
    best_score: float | None = None
    """Score of the best evaluation: its mean return, or the configured statistic or KPI."""
    env_base_seed: int | None = None
    agent_base_seed: int | None = None
    run_dir: str | None = None
    seconds: float = 0.0
    """Duration of training."""
    error: str | None = None
    violation: float | None = None
    """Constraint violation of the best evaluation; `None`: no constraints."""
    maximize: bool = True
    """Whether a larger `best_score` is better."""
    epochs: tuple[EpochSummary, ...] = field(default=(), repr=False)
    """The epochs that were trained."""

    @property
    def path(self) -> Path | None:
        """Directory of the run."""
        return None if self.run_dir is None else Path(self.run_dir)

    @property
    def history(self) -> pd.DataFrame:
        """The epochs as a table, indexed by their numbers.

        `n_steps`: environment steps of the run so far; `mean_reward`: over the training episodes that ended in the
        epoch, NaN if there are none.
        """
        import pandas as pd

        table: pd.DataFrame = pd.DataFrame(list(self.epochs), columns=list(EpochSummary._fields)).set_index("epoch")
        return table


class TrainingRun:
    """Build the runner of a loaded configuration on demand, and keep it for further calls.

    Every call uses the run's directory, statistics context, Hydra configuration and state of the global random
    generators, and restores the state of the process.

    :param loaded: The run's configuration.
    :param project: Working directory of the caller.
    :param keeps_directory: Use the configured directory, even if an earlier run has used it.
    :param silent: Print nothing.
    :param uploads: Uploads of the directory; `None`: its files are not uploaded.
    """

    def __init__(
        self, loaded: LoadedRun, project: Path, keeps_directory: bool, silent: bool, uploads: Uploads | None = None
    ) -> None:
        self.loaded = loaded
        self._uploads = uploads
        self.cfg = loaded.config
        self.run_dir: Path | None = None
        self.runner: Any = None
        self.project = project
        self._keeps_directory = keeps_directory
        self.verbose = checked_verbosity(self.cfg.verbose)
        self.silent = silent or self.verbose == QUIET
        self._stats = log_stats.StatsContext(stays_open=True)
        self._generators = GlobalGenerators()
        self._policy: TorchPolicy | None = None
        # Reason why the run cannot be trained further.
        self._end: str | None = None
        seeding = self.cfg.get("seeding") or {}
        seeds: dict[str, Any] = {key: seeding.get(key) for key in ("env_base_seed", "agent_base_seed")}
        self.result = RunResult(loaded.number, dict(loaded.swept), **seeds)
        """The result of the run so far."""

    # -- training ----------------------------------------------------------------------------------------------

    def train(self, n_epochs: int | None = None, n_steps: int | None = None, **train_kwargs: Any) -> None:
        """Train; a further call continues.

        :param n_epochs: Number of epochs; `None`: as configured.
        :param n_steps: Number of environment steps instead, rounded up to whole updates.
        :param train_kwargs: Further arguments of the runner's `run` and the trainer's `train`.
        :raises ConfigError: A number is not a whole number, or negative; both are given; the algorithm has no fixed
            number of steps per epoch.
        """
        self.require_trainable()
        for name, number, least in (("n_epochs", n_epochs, 0), ("n_steps", n_steps, 1)):
            if number is not None:
                whole_number(name, number, least)
        if n_epochs is not None and n_steps is not None:
            raise InvalidSpecificationError(
                f"train: expected either n_epochs or n_steps, found n_epochs={n_epochs} and n_steps={n_steps}."
            )
        directory = self.prepare()
        self._check_arguments(train_kwargs)
        if n_steps is not None:
            n_epochs = self._epochs_of_steps(n_steps)
        start = time.perf_counter()
        self._policy = None
        try:
            with self.inside(directory, self._stats):
                self.runner.run(n_epochs=n_epochs, **train_kwargs)
        except BaseException as error:
            self.note_failure(error)
            self._end = f"The training run has failed: {self.result.error}"
            self._stats.close(error)
            raise
        else:
            self.result = replace(self.result, status="completed")
        finally:
            seconds, epochs = time.perf_counter() - start, tuple(getattr(self.runner.trainer, "history", ()))
            self.result = replace(self.result, seconds=self.result.seconds + seconds, epochs=epochs)
            if (score := best_score(self.runner)) is not None:
                facts: dict[str, Any] = {"violation": score.violation, "maximize": score.maximize}
                self.result = replace(self.result, best_score=float(score), **facts)
        with output(self.silent):
            commands: dict[str, str] | None = {} if self.loaded.swept else None  # only of a single run
            print(run_summary.ending(directory, self.project, self.result.seconds, commands), flush=True)

    def require_trainable(self) -> None:
        """Raise a :class:`RunContextError` if the run cannot be trained further."""
        if self._end is not None:
            resuming = f" Resume from the last checkpoint: RunContext(run_dir={str(self.run_dir)!r}, ...)."
            raise RunContextError(f"{self._end}{'' if self.run_dir is None else resuming}")

    def prepare(self) -> Path:
        """Create the directory, write the run's files, and build the runner, unless this was done.

        :return: The directory.
        """
        if self.run_dir is not None:
            return self.run_dir
        try:
            claimed = claim_directory(self.loaded.workdir, self._keeps_directory)
        except ConfigError as error:
            raise InvalidSpecificationError(f"run_dir: {error}") from error
        directory = claimed.path
        try:
            with self.inside(directory, self._stats):
                self._write_run_info(directory)
                group = "/".join(directory.parent.parts[-2:]) if self.loaded.swept else ""
                self._stats.place = log_stats.RunPlace(directory, self.project, group)
                self._stats.register_writer(run_summary.report_writer(directory, self.project))
                runner = Factory(Runner).instantiate(self.cfg.runner, config_path="runner")  # type: ignore[type-abstract]
                evaluator = _own_evaluator(self.cfg)
                runner.setup(self.cfg)
                if evaluator is not None:
                    _connect(evaluator, runner)
        except BaseException as error:
            self._stats.close(error)
            claimed.remove_if_worthless()
            raise
        self.runner, self.run_dir = runner, directory
        self.result = replace(self.result, run_dir=str(directory))
        return directory

    def release(self) -> None:
        """Release resources of training; policy and statistics are read from the directory from then on."""
        self.close()
        self.runner, self._end = None, "The runs of a multirun are trained once."

    def note_failure(self, error: BaseException | None) -> None:
        """Record an error that ended the run."""
        self.result = replace(self.result, status="failed", error=f"{type(error).__name__}: {error}")

    def take_over(self, result: RunResult) -> None:
        """Take over the result of the run from another process."""
        self._end = "The runs of a multirun are trained once."
        self.result, self.run_dir = result, result.path

    def close(self) -> None:
        """Close environments, worker processes and writers."""
        if (close := getattr(self.runner, "close", None)) is not None:
            close()
        self._end = self._end or "This RunContext is closed."
        self._stats.close()

    # -- the trained policy --------------------------------------------------------------------------------------

    @property
    def policy(self) -> TorchPolicy:
        """The best policy so far, as a copy that further training does not change."""
        if self._policy is None:
            self._require_weights("policy")
            self._policy = self._built_policy() if self.runner is not None else self._stored_policy()
        return self._policy

    def compute_action(self, observation: Any, maze_state: Any, env: Any, actor_id: Any, deterministic: bool) -> Any:
        """Compute an action; arguments and errors are those of :meth:`maze.api.run_context.RunContext.compute_action`.

        :param observation: Observation of the actor.
        :param maze_state: State of the environment, for policies that need it.
        :param env: The environment, for policies that need it.
        :param actor_id: The actor; `None` if there is only one.
        :param deterministic: Take the deterministic (greedy) action instead of sampling.
        """
        policy = self.policy
        try:
            return policy.compute_action(observation, maze_state, env, actor_id, deterministic)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if not isinstance(actor_id, tuple | None):
                expected = "expected ActorID(step_key, agent_id) or None"
                raise InvalidSpecificationError(f"actor_id: {expected}, found {actor_id!r}.") from error
            spaces = SpacesConfig.load(self._spaces_file).observation_spaces_dict
            step_key = next(iter(spaces)) if actor_id is None else actor_id[0]
            check_entries(observation, dict_specs(spaces[step_key]), f"compute_action: sub-step {step_key!r}")
            raise

    @property
    def env_factory(self) -> Callable[[], Any]:
        """Factory of the environment with its wrappers and, once known, their normalization statistics."""
        known: Callable[[], Any] | None = getattr(self.runner, "env_factory", None)
        if known is not None:
            return known
        with imports_guarded(self.loaded.guard):
            factory = EnvFactory(self.cfg.env, self.cfg.get("wrappers") or {})
            directory = self.run_dir or self.cfg.get("input_dir")
            if not directory:
                return factory
            with closing(factory()) as env:
                return make_normalized_env_factory(factory, statistics_of_run(env, directory))

    @property
    def n_epochs(self) -> int:
        """Default number of epochs of `train`."""
        return int(self._algorithm["n_epochs"])

    def evaluate(self, other: Policy | None = None, **eval_kwargs: Any) -> Evaluation:
        """Roll the policy out and return the statistics over all episodes.

        :param other: A policy to evaluate instead.
        :param eval_kwargs: Arguments of `RolloutEvaluator`; `None`: as configured.
        """
        check_names("evaluate", eval_kwargs, inspect.signature(RolloutEvaluator).parameters)
        found: Any = other
        if not isinstance(found, Policy | None):
            expected = f"{found.__name__}(...)" if isinstance(found, type) else "an object such as RandomPolicy(...)"
            raise InvalidSpecificationError(f"policy: found {shown_value(found)}, expected {expected}.")
        if other is None:
            self._require_weights("evaluate")
        policy = self.policy if other is None else other
        directory = self.prepare()
        given = {name: value for name, value in eval_kwargs.items() if value is not None}
        arguments = {**self._evaluation_defaults(), **given}
        with self.inside(directory, log_stats.StatsContext()), ExitStack() as stack:
            log_stats.register_log_stats_writer(LogStatsWriterConsole())
            seeds = MazeSeeding.configured(self.cfg.get("seeding"))
            if other is None:
                kind = "deterministic actions" if arguments["deterministic"] else "sampled actions"
                print(f"Evaluating with {kind} (argument `deterministic`).", flush=True)
            else:
                print(f"Evaluating {type(other).__name__}.", flush=True)
                other.seed(seeds.generate_agent_instance_seed())
            if "eval_env" not in arguments:
                n_envs = min(whole_number("n_episodes", arguments["n_episodes"], 1), EVALUATION_EPISODES)
                make_env: Callable[[], Any] = FrozenEnvFactory(self.env_factory)
                if limit := self._algorithm.get("max_episode_steps"):  # of evaluations, in behavioural cloning
                    make_env = partial(time_limited, make_env, limit)
                env = SequentialVectorEnv([make_env] * n_envs, logging_prefix="eval")
                stack.callback(env.close)
                env.seed([seeds.generate_env_instance_seed() for _ in range(n_envs)])
                arguments["eval_env"] = env
            elif not isinstance(found := arguments["eval_env"], StructuredVectorEnv | LogStatsWrapper):
                expected = "a vector environment, or LogStatsWrapper.wrap(env)"
                raise InvalidSpecificationError(f"eval_env: found {shown_value(found)}, expected {expected}.")
            RolloutEvaluator(**arguments).evaluate(policy)
            return Evaluation(arguments["eval_env"].get_stats(log_stats.LogStatsLevel.EPOCH).last_stats)

    def compare(
        self,
        policies: Mapping[str, Policy],
        n_episodes: int,
        minimize: Sequence[str],
        maximize: Sequence[str],
        deterministic: bool,
    ) -> Comparison:
        """Evaluate given policies, a random policy and the trained policy on the same episodes.

        :param policies: The given policies by name.
        :param n_episodes: Number of episodes.
        :param minimize: Minimised KPIs.
        :param maximize: Maximised KPIs.
        :param deterministic: Take deterministic (greedy) actions.
        """
        from maze.evaluation.runners import ComparisonRunner

        own, given = ("random", "trained"), cast(object, policies)
        if not isinstance(given, Mapping) or any(name in given for name in own):
            expected = f"expected policies by names other than {' and '.join(own)}"
            raise InvalidSpecificationError(f"compare: policies: {expected}, found {policies!r}.")
        self._require_weights("compare")
        env = self.env_factory()
        players: dict[str | type, Any] = dict(policies.items())
        players |= zip(own, (RandomPolicy(env.action_spaces_dict), self.policy), strict=True)
        env.close()
        runner = ComparisonRunner(players, n_episodes, minimize, maximize, deterministic=deterministic)
        directory = self.prepare() / COMPARISON_DIR
        directory.mkdir(exist_ok=True)
        self.run_in_environment(runner, directory)
        return runner.comparison

    def run_in_environment(self, runner: Runner, directory: Path) -> None:
        """Run another runner with the environment and the seeds of the run.

        :param runner: A runner that evaluates policies.
        :param directory: Working directory.
        """
        parts = {"env": self.env_factory, "seeding": self.cfg.get("seeding")}
        with self.inside(directory, log_stats.StatsContext()):
            runner.setup(OmegaConf.create(parts, flags={"allow_objects": True}))
            runner.run()

    @contextmanager
    def inside(self, directory: Path, stats: log_stats.StatsContext) -> Iterator[None]:
        """Return a context of a call in the run's directory, or in one below, with given statistics."""
        with inside_run(self.loaded, directory, self.silent, self._generators, stats), uploaded(self._uploads):
            yield

    # -- helpers -------------------------------------------------------------------------------------------------

    def _write_run_info(self, directory: Path) -> None:
        if self.verbose == EVERYTHING:
            print(config_to_yaml(self.cfg, sort_keys=True), flush=True)
        print(run_summary.beginning(directory, self.project), flush=True)
        arguments = list(self.loaded.arguments)
        run_summary.write_run_info(directory, self.cfg, self.project, arguments)
        texts = {
            "hydra.yaml": OmegaConf.to_yaml(OmegaConf.masked_copy(self.loaded.hydra, "hydra")),
            "overrides.yaml": config_to_yaml(arguments[2:]) if arguments[2:] else "[]\n",
        }
        for name, text in texts.items():
            write_whole(directory / CLAIM / name, text)
        if self.loaded.placed:
            remark = f"{run_summary.FROM_PYTHON}{', '.join(self.loaded.placed)}: see hydra_config.yaml\n"
            write_whole(directory / run_summary.COMMAND_FILE, run_summary.command_text(*arguments) + remark)

    def _epochs_of_steps(self, n_steps: int) -> int:
        trainer = self.runner.trainer
        if not getattr(trainer, "steps_per_epoch", 0):
            raise InvalidSpecificationError(
                f"n_steps: {type(trainer).__name__} has no fixed number of environment steps per epoch. Set "
                "n_epochs instead."
            )
        return int(trainer.epochs_for(n_steps))

    def _check_arguments(self, train_kwargs: Mapping[str, Any]) -> None:
        signatures = map(inspect.signature, (self.runner.run, self.runner.trainer.train))
        accepted = (each for signature in signatures for each in signature.parameters.values())
        known = ["n_steps", *dict.fromkeys(each.name for each in accepted if each.kind is not each.VAR_KEYWORD)]
        check_names("train", train_kwargs, known)

    def _require_weights(self, what: str) -> None:
        if self.result.status != "not trained":
            return
        if not self.cfg.get("input_dir"):
            raise InvalidSpecificationError(
                f"{what}: expected a trained policy, but the run is not trained. Call train() first, or name an "
                "earlier run: run_dir='outputs/<name>/<time>' or overrides={'input_dir': 'outputs/<name>/<time>'}."
            )
        self.prepare()

    def _built_policy(self) -> TorchPolicy:
        trainer = self.runner.trainer
        policy = copy.deepcopy(getattr(trainer.model, "policy", trainer.model))
        selection = getattr(trainer, "model_selection", None)
        best = selection.state_dict()["best_weights"] if isinstance(selection, BestModelSelection) else None
        if best is not None:
            policy.load_state_dict(best)
        policy.eval()
        return policy  # type: ignore[no-any-return]

    @property
    def _spaces_file(self) -> Path:
        assert self.run_dir is not None, "there is a policy"
        return self.run_dir / str(self.cfg.runner.get("spaces_config_dump_file", "spaces_config.pkl"))

    def _stored_policy(self) -> TorchPolicy:
        if self.run_dir is None or self.result.status == "failed":
            raise RunContextError(f"Run {self.loaded.number} has no policy: {self.result.error}.")
        weights = str(self.cfg.runner.get("state_dict_dump_file", "state_dict.pt"))
        return SerializedTorchPolicy(self.cfg.model, str(self.run_dir / weights), str(self._spaces_file), device="cpu")

    @property
    def _algorithm(self) -> Mapping[str, Any]:
        """The values of the algorithm's configuration by name."""
        algorithm = self.cfg.algorithm
        return algorithm if isinstance(algorithm, Mapping) else vars(algorithm)

    def _evaluation_defaults(self) -> dict[str, Any]:
        config = self._algorithm
        evaluator = config.get("rollout_evaluator")
        values = evaluator if isinstance(evaluator, Mapping) else getattr(evaluator, "__dict__", {})
        return {
            "n_episodes": values.get("n_episodes") or config.get("n_eval_episodes") or EVALUATION_EPISODES,
            "deterministic": values.get("deterministic", True),
            "model_selection": None,
        }


def _own_evaluator(cfg: Any) -> RolloutEvaluator | None:
    """Return a copy of an evaluator given as an object, and put it into the configuration, since trainers change it."""
    evaluator = getattr(cfg.get("algorithm"), "rollout_evaluator", None)
    if not isinstance(evaluator, RolloutEvaluator):
        return None
    own = copy.copy(evaluator)
    place(cfg, "algorithm.rollout_evaluator", own)
    return own


def _connect(evaluator: RolloutEvaluator, runner: Any) -> None:
    """Connect an evaluator with the run's model selection, and seed its environments from the run's seeds."""
    if evaluator.model_selection is None:
        evaluator.model_selection = getattr(runner.trainer, "model_selection", None)
    if isinstance(evaluator.eval_env, StructuredVectorEnv):
        n_envs = evaluator.eval_env.n_envs
        evaluator.eval_env.seed([runner.maze_seeding.generate_env_instance_seed() for _ in range(n_envs)])


# -- rollouts and their statistics -------------------------------------------------------------------------------------


class Evaluation(dict[log_stats.LogStatsKey, Any]):
    """Statistics of an evaluation, by their keys; shown as one line of means."""

    @property
    def mean_reward(self) -> float:
        """Mean over the episodes of the sum of their rewards."""
        return float(self[log_stats.LogStatsKey(BaseEnvEvents.reward, "mean", None)])

    @property
    def kpis(self) -> dict[str, float]:
        """Means of the environment's KPIs over the episodes, by their names; empty where it has none."""
        means = (key for key in self if key.event is BaseEnvEvents.kpi and key.output_name == "mean")
        return {"/".join(map(str, key.group or ())): float(self[key]) for key in means}

    def to_frame(self) -> pd.DataFrame:
        """Return the statistics as a table; see :func:`statistics_frame`."""
        return statistics_frame(self)

    def __repr__(self) -> str:
        kpis = "".join(f", {name}={value:.5g}" for name, value in self.kpis.items())
        return f"Evaluation(mean_reward={self.mean_reward:.5g}{kpis})"


@contextmanager
def inside_run(
    loaded: LoadedRun, directory: Path, silent: bool, generators: GlobalGenerators, stats: log_stats.StatsContext
) -> Iterator[None]:
    """Return a context with the working directory, Hydra configuration, generators and statistics of a run.

    :param loaded: The configuration.
    :param directory: Directory of the run.
    :param silent: Print nothing.
    :param generators: State of the global random generators.
    :param stats: The run's statistics.
    """
    with (
        output(silent),
        imports_guarded(loaded.guard),
        inside_directory(directory),
        hydra_config(loaded.hydra),
        generators.active(),
        stats,
        one_numpy_thread(),
    ):
        yield


def roll_out(loaded: LoadedRun, project: Path, silent: bool) -> pd.DataFrame:
    """Run the rollout that a configuration describes, in its own directory.

    :param loaded: The configuration.
    :param project: Working directory of the caller.
    :param silent: Print nothing.
    :return: See :func:`statistics_frame`; `attrs` has the directories of the results.
    """
    from maze.core.rollout.rollout_runner import RolloutRunner

    claimed = claim_directory(loaded.workdir)
    directory, cfg = claimed.path, loaded.config
    start = time.perf_counter()
    with inside_run(loaded, directory, silent, GlobalGenerators(), log_stats.StatsContext()):
        try:
            use_stored_run(cfg, [*loaded.arguments[2:], *loaded.placed])
            run_summary.write_run_info(directory, cfg, project, loaded.arguments)
            runner = Factory(RolloutRunner).instantiate(cfg.runner, config_path="runner")  # type: ignore[type-abstract]
            runner.setup(cfg)
            runner.run()
        except BaseException:
            claimed.remove_if_worthless()
            raise
    assert runner.stats is not None
    frame = statistics_frame(runner.stats)
    frame.attrs |= {
        "run_dir": str(directory),
        "trajectory_dir": str(directory / TRAJECTORY_DIR) if runner.record_trajectory else None,
        "page_dir": str(directory / PAGE_DIR) if getattr(runner, "record_pages", False) else None,
        "event_log_dir": str(directory / EVENT_LOG_DIR) if runner.record_event_logs else None,
        "n_cut_off": runner.n_cut_off,
        "seconds": time.perf_counter() - start,
    }
    return frame


def statistics_frame(stats: log_stats.LogStats) -> pd.DataFrame:
    """Return statistics as a table with the column `value`, indexed by interface, event and statistic.

    For distributions, `value` is the array of samples.
    """
    import pandas as pd

    index = ["interface", "event", "statistic"]
    rows = [(*name_parts(key), _value(value)) for key, value in stats.items()]
    table: pd.DataFrame = pd.DataFrame(rows, columns=[*index, "value"], dtype=object).set_index(index).sort_index()
    return table


def _value(value: Any) -> Any:
    if (number := scalar_value(value)) is not None:
        return number
    samples = sample_values(value)
    return value if samples is None or isinstance(value, Mapping) else samples
