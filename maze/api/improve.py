"""Improvement of a heuristic: plan with it, learn from it, recommend the best policy that is confirmed."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from maze.api.training_run import TrainingRun
from maze.api.utils import check_names
from maze.cli.run_directory import claim_directory
from maze.cli.run_summary import command_text, shown_path, trust_arguments
from maze.console.runs import Progress
from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.context import ordered_seeds
from maze.core.errors import ConfigError, MazeError, first_line
from maze.core.utils.config_utils import duration, value_text, whole_number
from maze.core.utils.factory import TARGET_KEY, ConfigType, locate, path_of, plain_container
from maze.core.utils.stats_utils import Estimate, mean_interval, unseen_share
from maze.core.utils.stored_config import is_own_package
from maze.core.wrappers.time_limit_wrapper import time_limited
from maze.evaluation import runners
from maze.evaluation.comparison import LENGTH, RETURN, Comparison, PlayedEpisodes, comparison_page, intervals_figure
from maze.evaluation.gate import MIN_EPISODES, Gate, read_thresholds, require_episodes, require_measures
from maze.planning.branches import chance_in, simulation_of, stack_of
from maze.planning.rollout_policy import CANDIDATES, RolloutPolicy
from maze.report.page import Cell, code_list, number_text, page_section, table
from maze.runner import Runner

COST = "ms_per_decision"
"""Measure of the time in which a policy decides, in milliseconds of wall time."""
HEURISTIC, DCL, SELF_LABELLING, PPO = "heuristic", "dcl", "self_labelling", "ppo"
# Located when a command creates runs: run contexts import this module.
_RUN_CONTEXT = "maze.api.run_context.RunContext"
# Arguments of the runner that `RunContext.improve` passes.
_OF_CALL = ("policy", "budget", "context")
DIRECTORY = "improvement"
"""Directory of an improvement, in that of the training run of a `RunContext`."""
HEURISTIC_SHARE, PLANNING_SHARE, PPO_SHARE, LARGE_PPO_SHARE = 0.05, 0.15, 0.1, 0.3
"""Shares of the budget: at most, for the common episodes of the heuristic and of each rollout policy; for PPO after
another training run, which gets the rest: where planning is shown to be better than the heuristic, and where not."""
# Shares of the budget that are reserved for the confirmation, which also gets the remaining time: while there is no
# candidate; at most; and at most where a candidate needs them for the fewest episodes of a confirmation.
_LEAST_CONFIRMATION, _MOST_CONFIRMATION, _SLOW_CONFIRMATION = 0.15, 0.4, 0.65
LEAST_EPISODES = 20
"""Common episodes at least. They only determine the order in which candidates are confirmed."""
LEAST_CONFIRMING, _MOST_CONFIRMING = 50, 5
"""Episodes of the confirmation at least, and at most (times `n_episodes`). With 50, at most 8 % of candidates at the
margin pass where all episodes differ, and a quarter where only rare losses do (`benchmarks/intervals.py`)."""
# Episodes of the confirmation of the best candidate so far, for which time is reserved.
_WANTED_CONFIRMING = 75
# Share of the time for confirmations that a candidate gets while others follow.
_FIRST_CANDIDATE = 0.6
# Share of an update, or of a generation, by which training may exceed its time.
_ROUNDING = 0.2
# Seconds below which no training run is started.
_LEAST_TRAINING = 2.0
# Scenarios of planned decisions at least, before the number of episodes is reduced, and at most.
_FEWEST, _USUAL, _MOST = 8, 32, 512
# Candidates of planned decisions at most, where decisions are slow.
_FEW_CANDIDATES = 8
# Least share of the budget for the episodes of a trained policy.
_EPISODES_SHARE = 0.05
# Factor by which episodes may take more time than planned.
_OVERRUN = 1.5
# Share of the time of a planning policy that is spent on the decisions of its episodes.
_SHARE_OF_SIMULATION = 0.85
# Horizons that are compared; the last one only in arrays, which are fast.
_HORIZONS, _LAST_HORIZON = (5, 10, 20, 40), 160
# Horizon where none is shown to gain, as long as it leaves time for enough scenarios.
_USUAL_HORIZON = 20
_PILOT_SCENARIOS, _PILOT_CANDIDATES = 16, 4
# Demonstrations for cloning at most: in all, and for each second of training. A network that learns from 1,000 in a
# second then needs a quarter of the time for ten passes over them.
_WARM_START_STEPS, _WARM_START_RATE = 20_000, 25
# Labelled decisions of a generation of `dcl`; below the second number, the scenarios of a label are reduced.
_LEAST_STATES, _WANTED_STATES = 200, 5000
_LEAST_SCENARIOS, _SCENARIOS = 16, 128
_GENERATIONS = 2
# Episodes that select the best generation of `dcl`, or the best epoch of PPO.
_EVALUATION_EPISODES = 32
# Share of the time of a generation of `dcl` that one of its updates takes.
_UPDATE_SHARE = 0.01
# Share of the budget in which the time of a decision is measured; twice as much for the horizon.
_PILOT_SHARE = 0.02


class BudgetSpentError(MazeError):
    """A policy needs more time than it has."""


class Evaluation(NamedTuple):
    """Episodes of a policy.

    :param episodes: Measures of the episodes.
    :param n_decisions: Mean number of decisions in an episode.
    :param seconds_of_episode: Wall time of an episode.
    """

    episodes: PlayedEpisodes
    n_decisions: float
    seconds_of_episode: float

    @property
    def n_episodes(self) -> int:
        """Number of episodes."""
        return int(self.episodes.measures[RETURN].shape[1])

    def first(self, n_episodes: int) -> Evaluation:
        """Return the first episodes."""
        return self._replace(episodes=self.episodes.chosen(slice(n_episodes)))


@dataclass(frozen=True)
class Rung:
    """A policy that is compared with the heuristic, or the heuristic.

    :param name: Name of the policy.
    :param policy: The policy.
    :param make_env: Creates the environment that it acts in.
    :param evaluation: The common episodes.
    :param seconds: Wall time that the rung took: training and episodes.
    :param run: Directory of its training run; `None`: it is not trained.
    :param commands: Commands that use the policy, by their purposes.
    """

    name: str
    policy: Policy
    make_env: Callable[[], Any]
    evaluation: Evaluation
    seconds: float
    run: Path | None
    commands: Mapping[str, str]

    @property
    def played(self) -> PlayedEpisodes:
        """Measures of the policy in the common episodes."""
        return self.evaluation.episodes


def candidates_of(rungs: Sequence[Rung]) -> list[Rung]:
    """Return the policies whose mean return is larger than that of the first one, the best of them first.

    :param rungs: Evaluated policies, the heuristic first.
    """

    def mean(rung: Rung) -> float:
        return float(rung.played.measures[RETURN].mean())

    return sorted((rung for rung in rungs[1:] if mean(rung) > mean(rungs[0])), key=mean, reverse=True)


def chosen_horizon(horizons: Sequence[int], gains: np.ndarray) -> int:
    """Return the shortest horizon with a gain that is nearly as large as the largest one; 20 if none is shown to gain.

    Its gain is more than one standard error above zero, and not more than one below the largest gain.

    :param horizons: Environment steps, in rising order.
    :param gains: Gain of each horizon in some decisions, `[n_decisions, n_horizons]`.
    """
    if len(gains) < _FEWEST:
        return _USUAL_HORIZON
    means, root = gains.mean(axis=0), math.sqrt(len(gains))
    lacking = gains[:, [int(means.argmax())]] - gains
    is_close = lacking.mean(axis=0) <= lacking.std(axis=0, ddof=1) / root
    is_shown = means > gains.std(axis=0, ddof=1) / root
    return next((each for each, it in zip(horizons, is_close & is_shown, strict=True) if it), _USUAL_HORIZON)


@dataclass(frozen=True)
class Improvement:
    """Result of an improvement.

    :param rungs: The policies that were evaluated; the heuristic is the first.
    :param failures: Reasons why other policies were not, or could not be confirmed, by name.
    :param gates: The gate against the heuristic of each confirmed candidate, by name, in further episodes that played
        no part in its choice.
    """

    rungs: Sequence[Rung]
    failures: Mapping[str, str]
    gates: Mapping[str, Gate]
    horizon: int | None = None
    """Environment steps that planning simulates; `None`: planning was not possible."""
    minimized: Sequence[str] = ()
    """KPIs of which less is better."""
    maximized: Sequence[str] = ()
    """KPIs of which more is better."""

    @cached_property
    def comparison(self) -> Comparison:
        """The comparison of all policies with the heuristic; the time of a decision is a measure."""
        played, minimized = [rung.played for rung in self.rungs], [COST, *self.minimized]
        return Comparison(played, minimized, [RETURN, *self.maximized], [LENGTH, COST])

    @property
    def recommended(self) -> Rung:
        """The first candidate that passes the gate in further episodes; the heuristic, if none does."""
        passing = [name for name, gate in self.gates.items() if gate.passes]
        return next(rung for rung in self.rungs if rung.name == passing[0]) if passing else self.rungs[0]

    @property
    def policy(self) -> Policy:
        """The recommended policy."""
        return self.recommended.policy

    def differences(self, name: str) -> tuple[Estimate, Estimate]:
        """Return the differences of the return from the heuristic's, in the common and in further episodes.

        :param name: A policy with a gate, see `gates`.
        :raises KeyError: There is no such policy.
        """
        rows = [row for each in (self.comparison, self.gates[name].comparison) for row in each.rows_of(RETURN)]
        common, further = (row.difference for row in rows if row.policy == name and row.difference is not None)
        return common, further

    @property
    def sentence(self) -> str:
        """The recommendation as a sentence."""
        name = self.recommended.name
        if self.recommended is self.rungs[0]:
            return "Recommended: the heuristic itself. No other policy is shown to be better."
        common, further = map(_difference_text, self.differences(name))
        return (
            f"Recommended: {name}. In {self.gates[name].comparison.n_episodes} further episodes, its return differs "
            f"from the heuristic's by {further}; in the {self.comparison.n_episodes} common episodes, by {common}."
        )

    def text(self) -> str:
        """Return the report for the console."""
        commands = [line for what, each in self.recommended.commands.items() for line in (f"  # {what}", f"  {each}")]
        return "\n".join([self.comparison.text(), "", *self.remarks(), self.sentence, *commands])

    def remarks(self) -> Iterator[str]:
        """Yield sentences about each policy that is missing or not confirmed, and about few episodes."""
        for name, reason in self.failures.items():
            yield f"No {name}: {reason}"
        for name, gate in self.gates.items():
            n_episodes = gate.comparison.n_episodes
            if not gate.passes:
                common, further = map(_difference_text, self.differences(name))
                yield (
                    f"{name} is not confirmed: its return differs by {further} in {n_episodes} further episodes, after "
                    f"{common} in the common episodes. {gate.verdict}"
                )
            elif n_episodes < MIN_EPISODES:
                yield (
                    f"The budget allows {n_episodes} further episodes of {name}. Losses in fewer than "
                    f"{unseen_share(n_episodes):.1%} of the episodes may be missing. Before a release, use conf_gate "
                    f"with {MIN_EPISODES} others."
                )

    def page(self, subtitle: str) -> str:
        """Return the HTML report: recommendation, confirmation, cost against quality, comparison.

        :param subtitle: Subheading.
        """
        best, compared = self.recommended, comparison_page(self.comparison, datetime.now())
        header = ("candidate", "further episodes", "difference", "95 % of difference", "in common episodes", "result")
        rows: list[list[Cell]] = []
        for name, gate in self.gates.items():
            common, further = self.differences(name)
            ends = f"{number_text(further.low)} to {number_text(further.high)}"
            result = "confirmed" if gate.passes else "not confirmed"
            rows.append([name, gate.comparison.n_episodes, further.value, ends, common.value, result])
        caption = "Confirmation in further episodes, the best candidate first; the first that passes is recommended"
        remarks = "".join(f"<p>{html.escape(remark)}</p>" for remark in self.remarks())
        advice = f"<p>{html.escape(self.sentence)}</p>" + code_list(best.commands.items())
        sections = [
            page_section("Recommendation", advice, facts=(table(header, rows, caption) if rows else "") + remarks),
            page_section("Cost and quality", f'<div class="pair">{self._figure()}</div>\n'),
            *compared.sections,
        ]
        return replace(compared, title="Improvement of a heuristic", subtitle=subtitle, sections=sections).text()

    def _figure(self) -> str:
        """Draw the returns, ordered by the time of a decision, with marks of the Pareto front."""
        costs = {row.policy: row.mean.value for row in self.comparison.rows_of(COST)}
        rows, best = list[tuple[str, Estimate]](), -math.inf
        for row in sorted(self.comparison.rows_of(RETURN), key=lambda row: (costs[row.policy], -row.mean.value)):
            marks = " ◆" * (row.mean.value > best) + " ★" * (row.policy == self.recommended.name)
            best = max(best, row.mean.value)
            rows.append((f"{costs[row.policy]:.3g} ms: {row.policy}{marks}", row.mean))
        title = "Mean return by time of a decision; ◆: no other policy is faster and better; ★: recommended"
        return intervals_figure(title, rows, [np.empty(0)] * len(rows), None)


def _difference_text(difference: Estimate) -> str:
    return f"{difference.value:+.4g} ({difference.low:+.4g} to {difference.high:+.4g})"


class _TimedPolicy:
    """Measure the time in which a policy decides; all else is the policy's.

    :param policy: The policy.
    :param deadline: Time after which it decides no more, by `time.monotonic`.
    """

    def __init__(self, policy: Policy, deadline: float) -> None:
        self._policy, self._deadline = policy, deadline
        self.seconds: list[float] = []
        """Seconds of each decision in the running episode."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def compute_action(self, *args: Any, **kwargs: Any) -> Any:
        if self.seconds and time.monotonic() > self._deadline:
            raise BudgetSpentError
        start = time.perf_counter()
        action = self._policy.compute_action(*args, **kwargs)
        self.seconds.append(time.perf_counter() - start)
        return action


@dataclass(kw_only=True)
class ImproveRunner(runners.EvaluationRunner):
    """Improve a heuristic within a budget, and recommend the best policy that is confirmed to be better.

    The policies: the heuristic; a rollout policy with it as base; a policy that is trained from it (`dcl` if the
    environment is stochastic, `self_labelling` otherwise); a rollout policy with the trained policy as base; PPO,
    warm-started by cloning the heuristic. All play the same episodes, whose seeds training does not use. Where planning
    is slow, there are fewer episodes (at least 20). Candidates with a better mean return are confirmed by the gate
    against the heuristic in further episodes, the best first, until one passes. A policy that cannot be built, trained
    or evaluated is reported and left out. Writes `report.html`, `comparison.csv` and `episodes.csv`; training runs have
    directories below.

    :param policy: The heuristic, or its configuration.
    :param budget: Wall time of the command: seconds, or a text such as `10min`.
    :param n_episodes: Number of common episodes at most; the confirmation has at most five times as many.
    :param horizon: Environment steps that planning simulates; `None`: chosen by measurements.
    :param value: Estimate of the return after the horizon, for planning with the heuristic (see `policy=rollout`).
    :param n_processes: Worker processes of rollout policies.
    :param minimize: KPIs for which less is better. The gate also judges these.
    :param maximize: KPIs for which more is better, likewise.
    :param overrides: Values by path for all training runs, such as `{algorithm.lr: 0.001}`.
    :param context: Creates the training runs; `None`: with environment and wrappers of the configuration.
    """

    policy: ConfigType
    budget: float | str = "10min"
    n_episodes: int = MIN_EPISODES
    horizon: int | None = None
    value: Any = None
    n_processes: int = 1
    minimize: Sequence[str] = ()
    maximize: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    context: Callable[..., Any] | None = None
    improvement: Improvement = field(init=False, repr=False, compare=False)
    """The result of :meth:`run`; available after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policy:
            raise ConfigError(
                "policy: name the heuristic, an option of the group (policy=base_stock) or a class of your own "
                "('policy={_target_: my_module.MyHeuristic}')."
            )
        self.n_episodes = whole_number("runner.n_episodes", self.n_episodes, at_least=2)
        whole_number("runner.n_processes", self.n_processes, at_least=1)
        if self.horizon is not None:
            whole_number("runner.horizon", self.horizon, at_least=1)
        self._budget_s = duration("budget", self.budget)
        self._thresholds = read_thresholds({}, self.minimize, self.maximize, margin=0.0)
        require_episodes(self.n_episodes, self._thresholds)

    @override(runners.EvaluationRunner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        seeds = self.maze_seeding
        self._episode_seeds = seeds.episode_seeds(self.n_episodes)
        self._training_seeds = {
            "seeding.env_base_seed": seeds.generate_env_instance_seed(),
            "seeding.agent_base_seed": seeds.generate_agent_instance_seed(),
        }
        self._further_seeds = seeds.episode_seeds(_MOST_CONFIRMING * self.n_episodes)
        if self._n_instances and not self._is_grid:
            self._order_instances(self._n_instances)
        self._rungs: list[Rung] = []
        self._failures: dict[str, str] = {}
        self._gates: dict[str, Gate] = {}
        # Number of episodes that all policies play.
        self._common = len(self._episode_seeds)
        self._candidates, self._chooses_horizon = CANDIDATES, self.horizon is None

    def _order_instances(self, n_instances: int) -> None:
        """Let the common episodes play the first third of an instance set in order, and the confirmation the others.

        :raises ConfigError: The others are too few for a confirmation.
        """
        n_common = min(self.n_episodes, n_instances // 3)
        if n_instances - n_common < LEAST_CONFIRMING:
            raise ConfigError(
                f"env.instances: expected at least {LEAST_CONFIRMING} instances for the confirmation besides the "
                f"{n_common} that all policies play, found {n_instances}. Give {LEAST_CONFIRMING * 3 // 2} or more, or "
                "leave them out if the simulation draws its own."
            )
        every = ordered_seeds([*self._episode_seeds[:n_common], *self._further_seeds][:n_instances], n_instances)
        self._episode_seeds, self._further_seeds = every[:n_common], every[n_common:]

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        began = time.monotonic()
        self._end = began + self._budget_s
        try:
            self._evaluate_policies()
            self._confirm()
        except KeyboardInterrupt:
            self._failures["further results"] = "the command was interrupted. Other policies may be better."
            raise
        finally:
            if self._rungs:
                self._report(began)

    def _evaluate_policies(self) -> None:
        self._evaluate_heuristic()
        can_plan = self._attempt(f"rollout of {HEURISTIC}", self._planning_with_heuristic)
        learners = [PPO]
        with suppress(Exception):  # without copies, neither of them can train
            learners.insert(0, DCL if chance_in(stack_of(self._make_env())[0], "improve") else SELF_LABELLING)
        first, *others = learners
        planner = self._rungs[-1].policy
        is_better = can_plan and self._difference(self._rungs[-1]).low > 0
        later = (PPO_SHARE if is_better else LARGE_PPO_SHARE) * bool(others)
        planning = PLANNING_SHARE * (isinstance(planner, RolloutPolicy) and planner.scenarios >= _USUAL)
        if self._attempt(first, lambda name: self._training(name, later + planning)) and can_plan:
            self._attempt(f"rollout of {first}", lambda name: self._planning(name, first, later))
        for other in others:
            self._attempt(other, lambda name: self._training(name, 0.0))

    def _report(self, began: float) -> None:
        """Print and write the results.

        :param began: When the command began, by `time.monotonic`.
        """
        self._rungs = [replace(each, evaluation=each.evaluation.first(self._common)) for each in self._rungs]
        goals = runners.goals_of(self.minimize, self.maximize)
        self.improvement = Improvement(self._rungs, self._failures, self._gates, self.horizon, *goals)
        print(f"\n{self.improvement.text()}", flush=True)
        comparison = self.improvement.comparison
        times = f"budget: {self._budget_s:g} s of wall time, {time.monotonic() - began:.0f} s used"
        subtitle = times if self.horizon is None else f"{times}; planning horizon: {self.horizon} steps"
        if self._n_instances:
            subtitle += "; training visits all instances"
        runners.write_files(
            {
                runners.PAGE_FILE: self.improvement.page(subtitle),
                runners.COMPARISON_FILE: comparison.as_csv(),
                runners.EPISODES_FILE: comparison.episodes_as_csv(self._common_seeds),
            }
        )

    # -- confirmation --------------------------------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Judge the candidates by the gate in further episodes, the best first, until one passes."""
        # Training may have exceeded its time.
        self._end = max(self._end, time.monotonic() + self._reserved(0.0))
        candidates = candidates_of(self._rungs)
        for index, rung in enumerate(candidates):
            try:
                self._gates[rung.name] = self._gate(rung, _FIRST_CANDIDATE if index + 1 < len(candidates) else 1.0)
            except Exception as error:  # users' code
                self._failures[rung.name] = f"its {first_line(error)}"
                continue
            if self._gates[rung.name].passes:
                break

    def _gate(self, rung: Rung, share: float) -> Gate:
        """Judge a candidate by the gate in as many further episodes as a share of the time left allows."""
        heuristic, left = self._rungs[0], self._left()
        ours, theirs = (each.evaluation.seconds_of_episode for each in (rung, heuristic))
        least = LEAST_CONFIRMING * (ours + theirs)
        seconds = min(left, max(_SHARE_OF_SIMULATION * share * left, least))
        n_episodes = int(min(len(self._further_seeds), seconds / (ours + theirs)))
        if n_episodes < LEAST_CONFIRMING:
            raise BudgetSpentError(
                f"confirmation has time for {max(0, n_episodes)} further episodes, fewer than {LEAST_CONFIRMING}; set "
                "a larger budget."
            )
        print(f"-> confirmation of {rung.name}: {n_episodes} further episodes", flush=True)
        seeds, most = self._further_seeds[:n_episodes], self._left() - n_episodes * theirs
        candidate = self._played(rung.name, rung.make_env(), rung.policy, most, seeds, LEAST_CONFIRMING)
        seeds = seeds[: candidate.n_episodes]
        baseline = self._played(HEURISTIC, self._make_env(), heuristic.policy, math.inf, seeds)
        return Gate(baseline.episodes, candidate.episodes, self._thresholds, LEAST_CONFIRMING)

    # -- rungs ---------------------------------------------------------------------------------------------------------

    def _attempt(self, name: str, rung: Callable[[str], Rung]) -> bool:
        """Add a policy, or note the reason why there is none."""
        try:
            self._add(rung(name))
        except Exception as error:  # users' code, and methods that do not fit the environment
            self._failures[name] = first_line(error)
            print(f"-> no {name}: {first_line(error)}", flush=True)
        return name not in self._failures

    def _add(self, rung: Rung) -> None:
        self._rungs.append(rung)
        mean, cost = (float(rung.played.measures[measure].mean()) for measure in (RETURN, COST))
        print(f"-> {rung.name}: return {mean:.5g}, {cost:.3g} ms per decision, {rung.seconds:.0f} s", flush=True)

    def _evaluate_heuristic(self) -> None:
        """Evaluate the heuristic; its failure ends the command.

        :raises ConfigError: The budget is too small for its episodes, or they lack a measure that has a goal.
        """
        start, seconds = time.monotonic(), HEURISTIC_SHARE * self._budget_s
        env, heuristic = self.built({"policy": self.policy})
        self._batched = simulation_of(env) is not None
        modules = [type(each).__module__ for each in (heuristic, env.core_env, *stack_of(env))]
        packages = {module.partition(".")[0] for module in modules}
        self._trusted = trust_arguments(filter(is_own_package, packages), self._project)
        try:
            played = self._played(HEURISTIC, env, heuristic, seconds, self._common_seeds)
        except BudgetSpentError as error:
            raise ConfigError(
                f"budget={self.budget}: {LEAST_EPISODES} episodes of the heuristic take more than {seconds:.0f} s, "
                f"{HEURISTIC_SHARE:.0%} of the budget. Set a larger budget."
            ) from error
        require_measures(self._thresholds, Comparison([played.episodes]).measures)
        self._common = played.n_episodes
        self._add(Rung(HEURISTIC, heuristic, self._make_env, played, time.monotonic() - start, None, {}))

    def _planning_with_heuristic(self, name: str) -> Rung:
        """Choose the horizon if none is given, and plan with the heuristic."""
        if self.horizon is None:
            horizons = [*_HORIZONS, *[_LAST_HORIZON] * self._batched]
            policy = RolloutPolicy(
                self._rungs[0].policy, scenarios=_PILOT_SCENARIOS, candidates=_PILOT_CANDIDATES, value=self.value
            )
            deadline = time.monotonic() + 2 * _PILOT_SHARE * self._budget_s
            gains = policy.gains(self._make_env(), self._episode_seeds, horizons, deadline)
            self.horizon = chosen_horizon(horizons, gains)
            print(f"-> planning horizon: {self.horizon} steps, chosen by {len(gains)} decisions", flush=True)
        return self._planning(name, HEURISTIC, PPO_SHARE)

    def _planning(self, name: str, base_name: str, later: float) -> Rung:
        """Evaluate a rollout policy with as many scenarios as its time, and that of its confirmation, allow.

        The time of a decision is measured first. The first rollout policy determines the number of common episodes: as
        many as the time allows with 32 scenarios. More time gives more scenarios; less time, fewer. Where it does not
        even allow eight, this policy gets fewer candidates, and then the shortest horizon unless one is given; the next
        one does as well.

        :param later: Share of the budget that is left for what follows, besides the confirmation.
        """
        start = time.monotonic()
        heuristic, base = self._rungs[0], next(rung for rung in self._rungs if rung.name == base_name)
        if base is not heuristic and (difference := self._difference(base)).high < 0:
            raise BudgetSpentError(f"{base_name} is worse than the heuristic ({difference.value:+.4g}).")
        seconds = min(PLANNING_SHARE * self._budget_s, self._left() - self._reserved(later))
        affordable = self._affordable_scenarios(base, _USUAL, seconds, _MOST_CONFIRMATION / _WANTED_CONFIRMING)
        if base is heuristic:
            for horizon in dict.fromkeys((self.horizon, _HORIZONS[0] if self._chooses_horizon else self.horizon)):
                if affordable < _FEWEST:
                    self._candidates, self.horizon = _FEW_CANDIDATES, horizon
                    share = _SLOW_CONFIRMATION / LEAST_CONFIRMING
                    affordable = self._affordable_scenarios(base, 2 * _FEWEST, seconds, share)
        if affordable < _FEWEST:
            raise BudgetSpentError(
                f"{self._common} episodes, and the confirmation, leave time for {max(0.0, affordable):.2g} scenarios "
                f"of each decision, fewer than {_FEWEST}; set a larger budget or a shorter horizon."
            )
        scenarios = min(_MOST, 2 ** int(math.log2(affordable)))
        policy = self._rollout_policy(base, scenarios)
        played = self._played(name, base.make_env(), policy, _OVERRUN * seconds, self._common_seeds)
        self._common = played.n_episodes
        commands = {"Plan with it": self._planning_command(base, scenarios)}
        return Rung(name, policy, base.make_env, played, time.monotonic() - start, base.run, commands)

    def _affordable_scenarios(self, base: Rung, scenarios: int, seconds: float, of_confirming: float) -> float:
        """Return the number of scenarios of a decision that the time allows; the heuristic's sets that of episodes.

        :param base: Base of the rollout policy.
        :param scenarios: Number of scenarios with which the time of a decision is measured.
        :param seconds: Time of the common episodes.
        :param of_confirming: Share of the budget that an episode of the confirmation may take.
        """
        of_episode = base.evaluation.n_decisions * self._seconds_of_decision(base, scenarios)
        if base is self._rungs[0]:
            n_affordable = _SHARE_OF_SIMULATION * seconds * scenarios / (_USUAL * of_episode)
            self._common = min(self._common, max(LEAST_EPISODES, int(n_affordable)))
        most = min(seconds / self._common, of_confirming * self._budget_s)
        return _SHARE_OF_SIMULATION * scenarios / of_episode * most

    def _difference(self, rung: Rung) -> Estimate:
        """Return the difference of the return from the heuristic's in the common episodes."""
        first, other = (each.played.measures[RETURN][:, : self._common] for each in (self._rungs[0], rung))
        return Estimate.of(mean_interval(other, first))

    @property
    def _common_seeds(self) -> Sequence[tuple[int, int]]:
        return self._episode_seeds[: self._common]

    def _training(self, algorithm: str, later: float) -> Rung:
        """Train a policy from the heuristic in the time that is left, and evaluate it.

        :param algorithm: The algorithm.
        :param later: Share of the budget that is left for what follows, besides the confirmation.
        """
        start = time.monotonic()
        of_heuristic = self._common * self._rungs[0].evaluation.seconds_of_episode
        of_episodes = max(_OVERRUN * of_heuristic, _EPISODES_SHARE * self._budget_s)
        seconds = self._left() - self._reserved(later) - of_episodes
        if seconds < _LEAST_TRAINING:
            raise BudgetSpentError("no time is left for a training run; set a larger budget.")
        directory = Path.cwd() / algorithm
        print(f"-> {algorithm}: training for {seconds:.0f} s in {directory}", flush=True)
        settings = {**self._settings(algorithm, seconds), **self._training_seeds, **self.overrides}
        make = self.context or self._context
        with make(algorithm=algorithm, overrides=settings, run_dir=str(directory), silent=True) as context:
            train_for(context, seconds, by_steps=algorithm == PPO)
            policy, made = context.policy, context.env_factory
        make_env = partial(time_limited, made, self.max_episode_steps) if self.max_episode_steps else made
        # What was trained is evaluated, even if training has exceeded its time.
        most = max(self._left() - self._reserved(later), _OVERRUN * of_episodes)
        played = self._played(algorithm, make_env(), policy, most, self._common_seeds)
        self._common = played.n_episodes
        shown = str(shown_path(directory, self._project))
        commands = {
            "Export it to one file": command_text("--export", shown, "--out", "policy.maze", *self._trusted),
            "Serve it": "maze-serve policy.maze",
            "Show an episode": command_text("--play", shown, *self._trusted),
        }
        return Rung(algorithm, policy, make_env, played, time.monotonic() - start, directory, commands)

    def _played(
        self,
        name: str,
        env: Any,
        policy: Policy,
        seconds: float,
        seeds: Sequence[tuple[int, int]],
        least: int = LEAST_EPISODES,
    ) -> Evaluation:
        """Play episodes, and close the policy. Those that do not fit into the time are left out.

        :param name: Name of the policy.
        :param env: The environment.
        :param policy: The policy.
        :param seconds: Time of the episodes at most.
        :param seeds: Seeds of environment and agent in each episode.
        :param least: Number of episodes at least.
        :raises BudgetSpentError: Fewer fit into the time.
        """
        start, rows = time.monotonic(), list[dict[str, float]]()
        timed: Any = _TimedPolicy(policy, start + seconds)
        ends: list[tuple[int, float]] = []
        with Progress(len(seeds), name) as progress:

            def episode_done(measures: Mapping[str, float]) -> None:
                spent = timed.seconds
                rows.append({**measures, COST: 1e3 * sum(spent) / max(1, len(spent))})
                ends.append((len(spent), time.monotonic()))
                spent.clear()
                progress.update()

            policy.bind(env)
            try:
                runners.played_measures(env, timed, seeds, self.deterministic, episode_done)
            except BudgetSpentError:
                if len(ends) < min(least, len(seeds)):
                    raise BudgetSpentError(
                        f"{len(ends)} of {len(seeds)} episodes took {seconds:.0f} s, its share of the budget; "
                        "set a larger budget."
                    ) from None
            finally:
                if isinstance(policy, RolloutPolicy):
                    policy.close()
        counts, times = zip(*ends, strict=True)
        return Evaluation(PlayedEpisodes.of(name, [rows]), float(np.mean(counts)), (times[-1] - start) / len(ends))

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        """Return the seconds that are left of the budget."""
        return self._end - time.monotonic()

    def _reserved(self, later: float) -> float:
        """Return the seconds that are reserved for the confirmation of the best candidate so far, and for what follows.

        :param later: Share of the budget of what follows.
        """
        shares = [_LEAST_CONFIRMATION]
        for rung in candidates_of(self._rungs)[:1]:
            share = sum(each.evaluation.seconds_of_episode for each in (rung, self._rungs[0])) / self._budget_s
            shares.append(min(_WANTED_CONFIRMING * share, _MOST_CONFIRMATION))
            shares.append(min(LEAST_CONFIRMING * share, _SLOW_CONFIRMATION))
        return (max(shares) + later) * self._budget_s

    def _make_env(self) -> Any:
        return self.built({"policy": self.policy})[0]

    def _settings(self, algorithm: str, seconds: float) -> dict[str, Any]:
        """Return the values by path with which an algorithm starts from the heuristic."""
        heuristic, policy = self._rungs[0], plain_container(self.policy, "policy")
        if algorithm == DCL:
            generation_s = seconds / _GENERATIONS
            n_labels = 0.75 * generation_s / self._seconds_of_decision(heuristic, _LEAST_SCENARIOS)
            # Fewer scenarios are better than few states.
            scenarios = int(min(_SCENARIOS, _LEAST_SCENARIOS * max(1.0, n_labels / _WANTED_STATES)))
            n_states = int(n_labels * _LEAST_SCENARIOS / scenarios)
            if n_states < _LEAST_STATES:
                raise BudgetSpentError(
                    f"{seconds:.0f} s are enough for {n_states} simulated labels, fewer than {_LEAST_STATES}; set a "
                    "larger budget or a shorter horizon."
                )
            return {
                "algorithm.base": policy,
                "algorithm.horizon": self.horizon or _USUAL_HORIZON,
                "algorithm.value": self.value,
                "algorithm.scenarios": scenarios,
                "algorithm.generation_seconds": 0.96 * generation_s,
                "algorithm.rollout_evaluator.n_episodes": _EVALUATION_EPISODES,
                "algorithm.states_per_update": min(100, max(1, int(_UPDATE_SHARE * n_states))),
            }
        # The demonstrations for cloning take about a tenth of the time.
        steps_per_second = float(heuristic.played.measures[LENGTH].mean()) / heuristic.evaluation.seconds_of_episode
        n_demonstrations = min(_WARM_START_STEPS, max(500, seconds * min(_WARM_START_RATE, 0.1 * steps_per_second)))
        cloning = {
            "+warm_start.policy": policy,
            "warm_start.n_steps": int(n_demonstrations),
            "warm_start.entropy_coef": 0.2,
        }
        if algorithm != PPO:
            return {**cloning, "algorithm.epoch_length": 1}
        is_batched = self._batched and not (heuristic.policy.needs_state() or heuristic.policy.needs_env())
        batched = {"runner.placement": "batched", "runner.concurrency": 64} if is_batched else {}
        return {
            **cloning,
            **batched,
            "algorithm.critic_burn_in_epochs": 1,
            "algorithm.lr": 0.001,
            "algorithm.rollout_evaluator.n_episodes": _EVALUATION_EPISODES,
        }

    def _rollout_policy(self, base: Rung, scenarios: int) -> RolloutPolicy:
        value = self.value if base is self._rungs[0] else None
        return RolloutPolicy(base.policy, **self._limits(scenarios), value=value, n_processes=self.n_processes)

    def _limits(self, scenarios: int) -> dict[str, Any]:
        """Return the limits of a rollout policy's simulations."""
        return {"horizon": self.horizon, "scenarios": scenarios, "candidates": self._candidates}

    def _seconds_of_decision(self, rung: Rung, scenarios: int) -> float:
        """Measure the time in which a decision is simulated."""
        policy = self._rollout_policy(rung, scenarios)
        env = rung.make_env()
        policy.bind(env)
        timed: Any = _TimedPolicy(policy, time.monotonic() + _PILOT_SHARE * self._budget_s)
        with suppress(BudgetSpentError):
            runners.played_measures(env, timed, self._episode_seeds[:2], self.deterministic, lambda _: None)
        policy.close()
        return float(sum(timed.seconds)) / max(1, len(timed.seconds))

    @property
    def _project(self) -> Path:
        """Working directory of the user."""
        return Path(HydraConfig.get().runtime.cwd) if HydraConfig.initialized() else Path.cwd()

    def _context(self, **arguments: Any) -> Any:
        env, wrappers = (plain_container(self._cfg.get(name) or {}, name) for name in ("env", "wrappers"))
        return locate(_RUN_CONTEXT, "runner")(env=env, wrappers=wrappers or None, **arguments)

    def _planning_command(self, base: Rung, scenarios: int) -> str:
        """Return the command, or the line of Python, that plans with a policy."""
        if self.context is not None:
            name = "heuristic" if base.run is None else f"RunContext.load({str(base.run)!r}).policy"
            limits = ", ".join(f"{limit}={value}" for limit, value in self._limits(scenarios).items())
            return f"RolloutPolicy({name}, {limits})"
        shown = plain_container(self.policy, "policy") if base.run is None else shown_path(base.run, self._project)
        settings = [f"policy.base={value_text(shown)}"]
        settings += [f"policy.{limit}={value}" for limit, value in self._limits(scenarios).items()]
        if self.value is not None and base.run is None:
            settings.append(f"policy.value={value_text(plain_container(self.value, 'runner.value'))}")
        given = HydraConfig.get().overrides.task if base.run is None and HydraConfig.initialized() else []
        kept = [each for each in given if each.lstrip("+~").startswith(("env", "wrappers"))]
        return command_text(*kept, "policy=rollout", *settings, *([] if base.run is None else self._trusted))


def improve(
    run: TrainingRun,
    heuristic: Any,
    budget_s: float,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    run_context: Callable[..., Any],
) -> Improvement:
    """Improve a heuristic in the environment of a run of a `RunContext`.

    :param run: The run; it is not trained.
    :param heuristic: The policy, its class or its configuration.
    :param budget_s: Wall time of the call in seconds.
    :param given: Arguments of the `RunContext` for training runs.
    :param settings: Further arguments of :class:`ImproveRunner`.
    :param run_context: The class of run contexts.
    """

    def context(algorithm: str, overrides: Mapping[str, Any], **arguments: Any) -> Any:
        is_own = algorithm == given["algorithm"]
        kept = {name: it for name, it in given["overrides"].items() if is_own or not name.startswith("algorithm")}
        return run_context(**{**given, **arguments, "algorithm": algorithm, "overrides": {**overrides, **kept}})

    known = [each.name for each in fields(ImproveRunner) if each.init and each.name not in _OF_CALL]
    check_names("improve", settings, known)
    policy = {TARGET_KEY: path_of(heuristic)} if isinstance(heuristic, type) else heuristic
    runner = ImproveRunner(policy=policy, budget=budget_s, context=context, **settings)
    run.run_in_environment(runner, claim_directory(run.prepare() / DIRECTORY).path)
    return runner.improvement


def train_for(context: Any, seconds: float, by_steps: bool) -> None:
    """Train for about a time: one update or epoch first, then as many as fit, in calls that become longer.

    :param context: The `RunContext` of the run.
    :param seconds: Wall time.
    :param by_steps: Whether updates take a fixed number of environment steps; otherwise, epochs are counted.
    """
    end, n_units, unit = time.monotonic() + seconds, 1, 1
    while n_units:
        start = time.monotonic()
        context.train(**{"n_steps" if by_steps else "n_epochs": n_units * unit})
        if by_steps:
            unit = context.runner.trainer.steps_per_update()
        of_unit = max((time.monotonic() - start) / n_units, 1e-3)
        # The first unit includes preparations.
        n_units = max(0, int(min(4 * n_units, (end - time.monotonic()) / of_unit + _ROUNDING)))
