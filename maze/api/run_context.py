"""Training, rollouts and evaluation from Python, with the configurations of the command line."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.api.config_auditor import ConfigurationAuditor
from maze.api.config_loader import WEIGHTS, ConfigurationLoader, LoadedRun
from maze.api.training_run import Evaluation, RunResult, TrainingRun, roll_out
from maze.api.utils import InvalidSpecificationError, RunContextError, RunMode, output
from maze.cli.run_directory import claim_directory
from maze.core.errors import CheckpointError
from maze.core.utils.config_utils import hydra_session
from maze.core.utils.factory import TARGET_KEY
from maze.core.utils.files import is_url, local_copy, working_copy, write_whole
from maze.core.utils.import_guard import imports_guarded
from maze.core.utils.stored_config import STORED_CONFIG, StoredRun, chosen_options
from maze.report.run_page import RESULTS_FILE

if TYPE_CHECKING:
    import gymnasium
    import pandas as pd

    from maze.api.improve import Improvement
    from maze.core.agent.policy import Policy
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.base_env import BaseEnv
    from maze.core.env.maze_env import ActionType, MazeEnv
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.observation_conversion import ObservationType
    from maze.core.env.structured_env import ActorID
    from maze.core.wrappers.wrapper import Wrapper
    from maze.evaluation.comparison import Comparison
    from maze.perception.models.critics.base_state_critic_composer import BaseStateCriticComposer
    from maze.perception.models.model_composer import BaseModelComposer
    from maze.perception.models.policies.base_policy_composer import BasePolicyComposer
    from maze.train.trainers.common.config_classes import AlgorithmConfig

T = TypeVar("T")
logger = logging.getLogger(__name__)

ROLLOUT_DIR = "rollout"
"""Directory of rollouts, in that of the training run."""

ROLLOUT_RUNNER = "sequential"
_SECTIONS = ("env", "wrappers", "model")
_OPTION = re.compile(r"[\w-]+(/[\w-]+)*")


class RunContext:
    """Consistently configured training, rollouts and evaluation.

    Components are given as the name of a configuration module, as on the command line, as a mapping or as an object.
    Calls do not change working directory, random generators, Hydra and statistics of the process.

    With `multirun`, lists among components and overrides are the values of different
    runs, in all combinations; properties and results are lists with an entry for each run. Their annotations are the
    types for one run `| Any`, since unions with lists would require a distinction before each use.

    >>> rc = RunContext("CartPole-v1", algorithm="ppo", silent=True)
    >>> rc.config[RunMode.TRAINING].env.name
    'CartPole-v1'

    :param env: Environment: id, module, mapping, class or function that creates one, or an instance to copy; or a
        vector environment of gymnasium, or a factory for `num_envs` members, which are stepped together.
    :param run_dir: Directory to work in, or its URL (`s3://...`, `gs://...`, `file://...`), where all files are
        uploaded after each checkpoint; a directory with an earlier run continues from its model. `None`: a new
        directory below `outputs`, as on the command line.
    :param wrappers: Wrappers: module or a mapping from wrappers (class, path or name) to their arguments.
    :param algorithm: Algorithm and its hyperparameters.
    :param model: Model composer.
    :param policy: Policy composer; or the name of a policy, for rollouts without training.
    :param critic: Critic composer.
    :param launcher: Starts the runs of a `multirun`.
    :param tracking: Experiment trackers, one or a list: `tensorboard`, `wandb`, `mlflow`, `csv`; or a mapping from
        names to configurations.
    :param runner: Runner: `dev` steps environments in this process, `local` in worker processes.
    :param overrides: Values, mappings or objects by their paths in the configuration, such as `algorithm.lr`.
    :param configuration: Name of the root configuration (`-cn` on the command line).
    :param experiment: Name of an experiment (`+experiment=` on the command line).
    :param multirun: Whether lists stand for several runs.
    :param silent: Print nothing.
    """

    def __init__(
        self,
        env: str
        | Mapping[str, Any]
        | MazeEnv[Any]
        | gymnasium.Env[Any, Any]
        | gymnasium.vector.VectorEnv[Any, Any, Any]
        | Callable[..., MazeEnv[Any] | gymnasium.Env[Any, Any] | gymnasium.vector.VectorEnv[Any, Any, Any]]
        | None = None,
        run_dir: str | Path | None = None,
        wrappers: str | Mapping[str, Any] | Wrapper[Any] | None = None,
        algorithm: str | Mapping[str, Any] | AlgorithmConfig | None = None,
        model: str | Mapping[str, Any] | BaseModelComposer | None = None,
        policy: str | Mapping[str, Any] | BasePolicyComposer | None = None,
        critic: str | Mapping[str, Any] | BaseStateCriticComposer | None = None,
        launcher: str | Mapping[str, Any] | Launcher | None = None,
        runner: str | Mapping[str, Any] | None = None,
        overrides: dict[str, Mapping[str, Any] | Any] | None = None,
        configuration: str | None = None,
        experiment: str | None = None,
        multirun: bool = False,
        silent: bool = False,
        tracking: str | Sequence[str] | Mapping[str, Any] | None = None,
    ) -> None:
        self._silent, self._is_multirun = silent, multirun
        if not isinstance(run_dir, str | Path | None):
            raise InvalidSpecificationError(f"run_dir: expected a directory, found {run_dir!r}.")
        self._project, self._requested_dir = Path.cwd(), run_dir
        self._auditor = ConfigurationAuditor(
            {
                "env": env,
                "wrappers": wrappers,
                "algorithm": algorithm,
                "model": model,
                "policy": policy,
                "critic": critic,
                "launcher": launcher,
                "runner": runner,
            },
            overrides,
            multirun,
        )
        self._auditor.audit()
        self._launcher = launcher if isinstance(launcher, Launcher) else None
        self._named_policy = isinstance(policy, str)
        self._rollouts: list[LoadedRun] = []
        self._runs: list[TrainingRun] = []
        mode = RunMode.ROLLOUT if self._named_policy else RunMode.TRAINING
        uploads = None
        if run_dir is not None and is_url(run_dir):
            if multirun or self._named_policy:
                raise InvalidSpecificationError(
                    f"run_dir: {run_dir} is a URL, which is supported for a single run only."
                )
            uploads = working_copy(str(run_dir), self._project / "outputs", "run_dir")
            run_dir = str(uploads.directory)
        loader = ConfigurationLoader(self._auditor, mode, configuration, experiment, run_dir, self._project, tracking)
        with output(silent):
            loader.load()
        if self._named_policy:
            self._rollouts = loader.runs
        else:
            # Runs of a multirun have directories below a claimed one.
            keeps = run_dir is not None or multirun
            self._runs = [TrainingRun(loaded, self._project, keeps, silent, uploads) for loaded in loader.runs]
        self._finalizer = weakref.finalize(self, _close, self._runs)

    @classmethod
    def load(
        cls,
        run: str | Path,
        *,
        trusted_packages: Sequence[str] = (),
        overrides: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> RunContext:
        """Load an earlier training run, whose policy can act, be evaluated, rolled out and trained further.

        Environment, wrappers, model, algorithm with its hyperparameters, and seeds are those of the run. Further
        training starts from its best weights in a new directory.

        :param run: Directory of the run, or its URL.
        :param trusted_packages: Your own packages whose environments and networks the run may name.
        :param overrides: Values that replace those of the run.
        :param arguments: Further arguments of the constructor; components replace those of the run.
        :raises InvalidSpecificationError: It is not a directory of a training run, or names components that cannot be
            built.
        """
        with imports_guarded():
            place = Path(local_copy(str(run), "load"))
            return cls(**_stored_arguments(place, trusted_packages, arguments, overrides or {}))

    # -- calls -------------------------------------------------------------------------------------------------

    def train(self, n_epochs: int | None = None, *, n_steps: int | None = None, **train_kwargs: Any) -> RunResult | Any:
        """Train the policy; a further call continues.

        :param n_epochs: Number of epochs; `None`: as configured.
        :param n_steps: Number of environment steps instead of epochs, rounded up to whole updates; epochs become
            shorter where whole ones would take more. The random steps that fill a replay buffer at first come on top.
        :param train_kwargs: Further arguments of the trainer.
        :return: The result so far: `best_score`, `path`, the table `history`.
        :raises InvalidSpecificationError: An argument is unknown; both epochs and steps are given; the algorithm takes
            no fixed number of environment steps in an epoch.
        :raises RunContextError: An earlier call failed or was interrupted, or this object is closed. With `multirun`:
            runs have failed, or were trained before.
        :raises TrainingInterrupted: SIGINT or SIGTERM ended the run; it is a `KeyboardInterrupt`.
        """
        runs = self._trained("train")
        if self._is_multirun:
            given = {"n_epochs": n_epochs, "n_steps": n_steps, **train_kwargs}
            _train_all(runs, self._launcher, self._requested_dir is not None, given)
        else:
            runs[0].train(n_epochs, n_steps, **train_kwargs)
        return self.results

    def compute_action(
        self,
        observation: ObservationType,
        maze_state: MazeStateType | None = None,
        env: BaseEnv | None = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> ActionType:
        """Compute an action of the trained policy.

        :param observation: Observation of the actor: values by key, in the shapes of the environment's space.
        :param maze_state: State of the environment, for policies that need it.
        :param env: The environment, for policies that need it.
        :param actor_id: The actor; `None` if there is only one.
        :param deterministic: Take the deterministic (greedy) action instead of sampling.
        :return: Values by action head, in the shapes of the environment's action space.
        :raises EnvironmentContractError: The observation does not fit the networks; the message names the key.
        :raises InvalidSpecificationError: There is no trained policy, or `actor_id` is not an `ActorID`.
        :raises ConfigError: The policy has no network for this actor, or `actor_id` is needed.
        """
        given = (maze_state, env, actor_id, deterministic)
        return self._one_or_all([run.compute_action(observation, *given) for run in self._trained("compute_action")])

    def evaluate(
        self,
        n_episodes: int | None = None,
        deterministic: bool | None = None,
        *,
        policy: Policy | None = None,
        **eval_kwargs: Any,
    ) -> Evaluation | Any:
        """Roll the trained policy out, print the statistics and return them.

        :param n_episodes: Number of episodes; `None`: as in the algorithm's own evaluation.
        :param deterministic: Take deterministic (greedy) actions; `None`: as in the algorithm's own evaluation.
        :param policy: Another policy to evaluate in the same episodes, such as a heuristic; requires no training. Its
            generators are seeded by the seed of the run.
        :param eval_kwargs: Further arguments of `RolloutEvaluator`.
        :return: The statistics, with `mean_reward`, `kpis` and `to_frame()`.
        :raises InvalidSpecificationError: An argument is unknown or of another type, or there is no trained policy.
        """
        arguments = {"n_episodes": n_episodes, "deterministic": deterministic, **eval_kwargs}
        return self._one_or_all([run.evaluate(policy, **arguments) for run in self._trained("evaluate")])

    def compare(
        self,
        policies: Mapping[str, Policy] | None = None,
        n_episodes: int = 50,
        minimize: Sequence[str] = (),
        deterministic: bool = True,
        maximize: Sequence[str] = (),
    ) -> Comparison | Any:
        """Evaluate given policies, a random policy and the trained policy on the same episodes.

        Print the differences of returns and KPIs with confidence intervals, and write an HTML report, `report.html`,
        and tables into `comparison` in the run's directory.

        :param policies: Policies by name, such as heuristics; the first one is the baseline.
        :param n_episodes: Number of episodes.
        :param minimize: Minimised KPIs.
        :param deterministic: Take deterministic (greedy) actions.
        :param maximize: Maximised KPIs.
        :raises InvalidSpecificationError: There is no trained policy, or a given one is called `random` or `trained`.
        """
        given = (policies or {}, n_episodes, minimize, maximize, deterministic)
        return self._one_or_all([run.compare(*given) for run in self._trained("compare")])

    def improve(
        self, heuristic: Policy | type[Policy] | Mapping[str, Any], budget_s: float = 600.0, **settings: Any
    ) -> Improvement | Any:
        """Improve a heuristic within a budget, and recommend the best policy that is confirmed to be better.

        Evaluate the heuristic, its rollout policy, a policy trained from it, the rollout policy of that, and PPO
        warm-started from it, on the same episodes. Confirm the best one by the gate in further episodes. Print the
        policies and the recommendation, and write an HTML report,
        `report.html`, and tables into `improvement` in the run's directory. The run itself is not trained. Training
        runs have its environment, wrappers, model and overrides; those of the algorithm, where it is the same.

        :param heuristic: The policy, its class or its configuration.
        :param budget_s: Wall time of the call in seconds.
        :param settings: Further arguments of :class:`~maze.api.improve.ImproveRunner`, such as `n_episodes`, `horizon`,
            `minimize`, `maximize` or `overrides`.
        :return: The result, with `policy` (the recommended one), `recommended`, `rungs` and `comparison`.
        """
        from maze.api.improve import improve

        runs = self._trained("improve")
        values = self._auditor.overrides.items()
        kept = {name: value for name, value in values if not name.startswith("seeding")}
        given = {"algorithm": None, **self._auditor.kwargs, "overrides": kept}
        return self._one_or_all([improve(run, heuristic, budget_s, given, settings, RunContext) for run in runs])

    def rollout(
        self,
        n_episodes: int | None = None,
        runner: str | Mapping[str, Any] | None = None,
        env_base_seed: int | None = None,
        agent_base_seed: int | None = None,
        *,
        policy: Policy | None = None,
        **runner_arguments: Any,
    ) -> pd.DataFrame | Any:
        """Roll out the trained policy, or the named one.

        Trajectories and event logs are written into `rollout` in the run's directory.

        :param n_episodes: Number of episodes; `None`: as configured for the runner.
        :param runner: `sequential`, `parallel` or the configuration of a rollout runner; `None`: in this process.
        :param env_base_seed: Seed of the environments; `None`: that of the training run.
        :param agent_base_seed: Seed of the policy; `None`: that of the training run.
        :param policy: Another policy, such as a heuristic; requires no training.
        :param runner_arguments: Further arguments of the runner, such as `max_episode_steps`, `deterministic`,
            `record_pages`, `record_trajectory`, `record_event_logs`, `render` or `n_processes`.
        :return: Statistics with the column `value`, indexed by interface, event and statistic. `attrs` has the
            directories (`run_dir`, `trajectory_dir`, `page_dir`, `event_log_dir`), the number of episodes that were
            truncated after `max_episode_steps` (`n_cut_off`) and the duration (`seconds`).
        :raises InvalidSpecificationError: There is no policy, or one was given to the constructor and here.
        """
        arguments = {f"runner.{key}": value for key, value in runner_arguments.items()}
        if n_episodes is not None:
            arguments["runner.n_episodes"] = n_episodes
        seeds = {"seeding.env_base_seed": env_base_seed, "seeding.agent_base_seed": agent_base_seed}
        arguments |= {key: seed for key, seed in seeds.items() if seed is not None}
        if self._named_policy:
            if policy is not None:
                raise InvalidSpecificationError(
                    f"rollout: policy={self._auditor.kwargs['policy']!r} was given to the constructor. Remove one."
                )
            loaded = [self._named_rollout(run, runner, arguments) for run in self._rollouts]
        else:
            loaded = [self._rollout_of(run, policy, runner, arguments) for run in self._runs]
        return self._one_or_all([roll_out(run, self._project, self._silent) for run in loaded])

    def close(self) -> None:
        """Close environments, worker processes and log files. The garbage collector calls it as well."""
        self._finalizer()

    def __enter__(self) -> RunContext:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- properties --------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[RunMode, DictConfig | list[DictConfig] | None]:
        """The configurations by run mode; `None` for the other mode."""
        training = self._one_or_all([run.cfg for run in self._runs]) if self._runs else None
        rollout = self._one_or_all([run.config for run in self._rollouts]) if self._rollouts else None
        return {RunMode.TRAINING: training, RunMode.ROLLOUT: rollout}

    @property
    def run_dir(self) -> str | Any | None:
        """Directory of the training run; `None` before it is created."""
        directories = [run.result.run_dir for run in self._runs]
        if self._is_multirun:
            return [directory for directory in directories if directory is not None]
        return directories[0] if directories else None

    @property
    def policy(self) -> TorchPolicy | Any:
        """The trained policy, with the weights of the best evaluation."""
        return self._one_or_all([run.policy for run in self._trained("policy")])

    @property
    def env_factory(self) -> Callable[[], MazeEnv[Any]] | Any:
        """Factory of the training environment with its wrappers."""
        return self._one_or_all([run.env_factory for run in self._trained("env_factory")])

    @property
    def runner(self) -> Any:
        """The runner; `None` before training."""
        return self._one_or_all([run.runner for run in self._trained("runner")])

    @property
    def n_epochs(self) -> int | Any:
        """Default number of epochs of `train`; 0: until early stopping, at most 1,000."""
        return self._one_or_all([run.n_epochs for run in self._trained("n_epochs")])

    @property
    def results(self) -> RunResult | Any:
        """Result of the training run: status, best score, seeds and directory."""
        return self._one_or_all([run.result for run in self._trained("results")])

    def results_frame(self) -> pd.DataFrame:
        """Return the results as a table with a row for each run."""
        return _results_frame([run.result for run in self._trained("results_frame")])

    # -- helpers -------------------------------------------------------------------------------------------------

    def _one_or_all(self, values: Sequence[T]) -> T | list[T]:
        return list(values) if self._is_multirun else values[0]

    def _trained(self, what: str) -> list[TrainingRun]:
        """Return the training runs, which a call or property requires."""
        if self._named_policy:
            raise InvalidSpecificationError(
                f"{what}: not available for policy={self._auditor.kwargs['policy']!r}, which is only rolled out. For "
                "training, leave policy out or pass a composer such as ProbabilisticPolicyComposer(...)."
            )
        return self._runs

    def _rollout_of(
        self, run: TrainingRun, policy: Policy | None, runner: Any, arguments: Mapping[str, Any]
    ) -> LoadedRun:
        """Return the rollout of the trained policy, or of another one in the training environment."""
        if policy is None:
            policy = run.policy
        directory = run.prepare() / ROLLOUT_DIR
        seeding = run.cfg.get("seeding") or {}
        seeds = {f"seeding.{key}": value for key, value in seeding.items() if f"seeding.{key}" not in arguments}
        overrides = {"policy": policy, **seeds, **arguments}
        auditor = ConfigurationAuditor({"env": run.env_factory, "runner": runner or ROLLOUT_RUNNER}, overrides)
        return self._loaded_rollout(auditor, directory)

    def _named_rollout(self, run: LoadedRun, runner: Any, arguments: Mapping[str, Any]) -> LoadedRun:
        """Return the rollout of a named policy."""
        given = {**self._auditor.kwargs, **{key: run.swept[key] for key in run.swept if key in self._auditor.kwargs}}
        values = {**self._auditor.overrides, **{key: run.swept[key] for key in run.swept if key not in given}}
        given["runner"] = runner or given.get("runner", ROLLOUT_RUNNER)
        auditor = ConfigurationAuditor(given, {**values, **arguments})
        directory = None if self._requested_dir is None else Path(self._requested_dir) / ROLLOUT_DIR
        return self._loaded_rollout(auditor, directory)

    def _loaded_rollout(self, auditor: ConfigurationAuditor, directory: Path | None) -> LoadedRun:
        auditor.audit()
        loader = ConfigurationLoader(auditor, RunMode.ROLLOUT, run_dir=directory, project=self._project)
        loader.load()
        return loader.runs[0]


def _stored_arguments(
    run: Path, trusted_packages: Sequence[str], given: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a RunContext that continues a training run.

    :param run: Directory of the run.
    :param trusted_packages: Packages whose classes the run may name.
    :param given: Arguments that replace those of the run.
    :param overrides: Values that replace those of the run.
    :raises InvalidSpecificationError: It is not a training run, or names components that cannot be built.
    """
    stored = StoredRun(run.absolute(), trusted_packages)
    directory = stored.directory
    if not (directory / STORED_CONFIG).is_file() or not any((directory / name).is_file() for name in WEIGHTS):
        raise InvalidSpecificationError(
            f"load: {run} is not the directory of a training run: expected {STORED_CONFIG.as_posix()} and "
            f"{WEIGHTS[0]} in it. maze-run --runs lists the runs below outputs."
        )
    arguments = dict(given)
    wanted = [section for section in _SECTIONS if section not in given]
    if {"policy", "critic"} & set(given):
        wanted = [section for section in wanted if section != "model"]
    values: dict[str, Any] = {"input_dir": str(directory)}
    try:
        arguments |= stored.sections(wanted, "{0}=... as an argument of load")
        for section in ("seeding",) if "algorithm" in given else ("seeding", "algorithm"):
            values |= _values(stored, section, {key.lstrip("+~") for key in overrides}, bool(given.get("multirun")))
    except CheckpointError as error:
        raise InvalidSpecificationError(f"load: {error}") from error
    if "algorithm" not in given:
        arguments["algorithm"] = _algorithm(stored)
    return {**arguments, "overrides": {**values, **overrides}}


def _algorithm(run: StoredRun) -> str:
    """Return the chosen option of the group; untrusted files may hold any other value."""
    choice = chosen_options(run.directory).get("algorithm")
    if not isinstance(choice, str) or not _OPTION.fullmatch(choice):
        raise InvalidSpecificationError(
            f"load: {run.directory} has no valid name of its algorithm. Name it: load(..., algorithm='ppo')."
        )
    return choice


def _values(run: StoredRun, section: str, replaced: Set[str], are_choices: bool) -> dict[str, Any]:
    """Return the values of a section by their paths.

    :param run: The run.
    :param section: The section.
    :param replaced: Paths that are left out.
    :param are_choices: Whether a list stands for several runs, and one as a value is a list in a list.
    """
    found = run.config.value(section)
    keys = [key for key in found if key != TARGET_KEY] if isinstance(found, dict) else []
    paths = [path for path in (f"{section}.{key}" for key in keys) if path not in replaced]
    values = {**dict.fromkeys(paths), **run.sections(paths, "overrides={{'{0}': ...}}")}
    return {path: [each] if are_choices and isinstance(each, list) else each for path, each in values.items()}


def _close(runs: Sequence[TrainingRun]) -> None:
    for run in runs:
        run.close()


# -- several runs, sequentially or by a launcher of Hydra --------------------------------------------------------------

# Fields of a result that are the index of its row, separate columns, or a table.
_NO_COLUMNS = ("number", "overrides", "epochs")

_IN_PROCESS = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def _train_all(
    runs: Sequence[TrainingRun], launcher: Launcher | None, keeps_directory: bool, train_kwargs: Mapping[str, Any]
) -> None:
    """Train all runs; failed runs do not stop the others.

    :param runs: The runs.
    :param launcher: Starts them; `None`: the configured one.
    :param keeps_directory: Work in the configured directory, even if an earlier multirun has used it.
    :param train_kwargs: Arguments of `train`.
    :raises RunContextError: Runs have failed; the others have been trained.
    """
    for run in runs:
        run.require_trainable()
    base = runs[0].loaded.workdir.parent
    if not keeps_directory:
        base = claim_directory(base).path
        for run in runs:
            run.loaded = replace(run.loaded, workdir=base / run.loaded.workdir.name)
    target = OmegaConf.select(runs[0].loaded.hydra, "hydra.launcher._target_")
    first_error: BaseException | None = None
    if launcher is not None or target != _IN_PROCESS:
        first_error = _launch(runs, launcher, base, train_kwargs)
    else:
        for run in runs:
            try:
                run.train(**train_kwargs)
            except Exception as error:  # noqa: PERF203 (the other runs are trained)
                logger.error("Run %d failed: %s", run.loaded.number, error)
                run.note_failure(error)
                first_error = first_error or error
            finally:
                run.release()
    frame = _results_frame([run.result for run in runs])
    write_whole(base / RESULTS_FILE, frame.to_csv())
    with output(runs[0].silent):
        print(frame.to_string(), flush=True)
    if failed := [str(run.loaded.number) for run in runs if run.result.status == "failed"]:
        raise RunContextError(
            f"{len(failed)} of {len(runs)} runs failed ({', '.join(failed)}); see `results`. The first "
            f"error: {first_error}"
        ) from first_error


def _results_frame(results: Sequence[RunResult]) -> pd.DataFrame:
    """Return a row for each run, indexed by its number; values that distinguish the runs come first."""
    import pandas as pd

    swept = list(dict.fromkeys(key for result in results for key in result.overrides))
    others = [field.name for field in fields(RunResult) if field.name not in _NO_COLUMNS]
    rows = [
        {**{key: result.overrides.get(key) for key in swept}, **{name: getattr(result, name) for name in others}}
        for result in results
    ]
    index = pd.Index([result.number for result in results], name="run")
    frame: pd.DataFrame = pd.DataFrame(rows, index=index, columns=[*swept, *others])
    return frame


def _launch(
    runs: Sequence[TrainingRun], launcher: Launcher | None, base: Path, train_kwargs: Mapping[str, Any]
) -> BaseException | None:
    """Run the jobs with a launcher of Hydra.

    :return: The first error.
    """
    from hydra._internal.callbacks import Callbacks

    from maze.cli.launchers import outcome

    master: DictConfig = runs[0].loaded.hydra
    with read_write(master.hydra), open_dict(master.hydra):
        master.hydra.sweep.dir = str(base)
        master.hydra.hydra_logging = {"version": 1, "root": None}  # the process keeps its own
    job = partial(_train_job, [run.loaded for run in runs], runs[0].project, runs[0].silent, train_kwargs)
    with hydra_session("maze.conf"):
        context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks())
        if launcher is None:
            launcher = Plugins.instance().instantiate_launcher(context, job, master)
        else:
            launcher.setup(hydra_context=context, task_function=job, config=master)
        HydraConfig.instance().set_config(master)
        texts = [[text for text in run.loaded.arguments[2:] if not text.startswith("hydra/launcher=")] for run in runs]
        returns = launcher.launch(texts, initial_job_idx=0)
    first_error: BaseException | None = None
    for run, returned in zip(runs, returns, strict=True):
        if isinstance(found := outcome(returned), BaseException):
            run.note_failure(found)
            first_error = first_error or found
        else:
            run.take_over(found)
    return first_error


def _train_job(
    runs: Sequence[LoadedRun], project: Path, silent: bool, kwargs: Mapping[str, Any], cfg: Any
) -> RunResult:
    """Train the run with Hydra's job number, possibly in another process, as the task of a launcher.

    The configuration that Hydra composes there is not used: it lacks the inserted objects.
    """
    run = TrainingRun(runs[int(HydraConfig.get().job.num)], project, keeps_directory=True, silent=silent)
    with closing(run):
        run.train(**kwargs)
        return run.result
