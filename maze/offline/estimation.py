"""Runner and HTML report of `maze-run -cn conf_estimate`: returns of policies, estimated from logged episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import numpy as np

from maze.core.agent.action_distribution import log_probabilities
from maze.core.annotations import override
from maze.core.errors import ConfigError, GateNotPassedError, unknown_key_error
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps
from maze.core.trajectory_recording.datasets.trajectory_processor import IdentityWithNextObservationTrajectoryProcessor
from maze.core.trajectory_recording.records.spaces_record import ACTED_BY
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord, TrajectoryRecord
from maze.core.utils.config_utils import number
from maze.core.utils.factory import CollectionOfConfigType
from maze.core.utils.files import aligned, csv_text
from maze.core.utils.stats_utils import Estimate, t_interval
from maze.evaluation import runners
from maze.evaluation.comparison import intervals_figure
from maze.offline import estimate
from maze.report.page import Page, fact_list, page_section, table
from maze.runner import Runner
from maze.utils.process import use_one_thread

ESTIMATES_FILE, PAGE_FILE = "estimates.csv", "report.html"
CLONED = "cloned"
"""Value of `behaviour`: the probabilities of the logged actions are estimated."""
_HEADER = ("policy", "estimator", "estimate", "95 %", "effective episodes", "largest weight", "without support")


class CompleteTrajectoryProcessor(IdentityWithNextObservationTrajectoryProcessor):
    """Add next observations to recorded states; keep all steps of recorded observations and actions.

    :param acted_by: Name of the policy in a decision log whose episodes are kept; `None`: all trajectories are.
    """

    def __init__(self, acted_by: str | None = None) -> None:
        self.acted_by = acted_by
        self.known = set[str]()
        """Names of the policies that acted in the processed episodes."""

    @override(IdentityWithNextObservationTrajectoryProcessor)
    def process(self, trajectory: TrajectoryRecord[Any], conversion_env: Any) -> list[list[StructuredSpacesRecord]]:
        records = trajectory.step_records if isinstance(trajectory, SpacesTrajectoryRecord) else []
        infos = [substep.info or {} for step in records for substep in step.substep_records]
        names = dict.fromkeys(str(info[ACTED_BY]) for info in infos if ACTED_BY in info)
        self.known.update(names)
        if self.acted_by is not None and list(names) != [self.acted_by]:
            return []
        return [list(records)] if records else super().process(trajectory, conversion_env)


@dataclass
class EstimationRunner(runners.EvaluationRunner):
    """Estimate the discounted return of policies from logged episodes, without playing any.

    Writes `estimates.csv` and `report.html`, and prints the table.

    :param policies: As for :class:`~maze.evaluation.runners.ComparisonRunner`; each of several runs of one name has
        estimates of its own. None: only the log is described.
    :param data: Logged episodes: a trajectory file, a directory of them, a table (`*.parquet`), a decision log of a
        server, or a Minari data set (`minari:<id>`).
    :param behaviour: Name of the entry of `policies` that acted in the log, which gives the probabilities of the logged
        actions; `cloned`: they are estimated; `None`: they are read from the log, where it has any.
    :param gamma: Discount factor per environment step.
    :param truncation_ends: Episodes end where they were truncated, as by a time limit that belongs to the problem;
        `False`: they continue in fitted values.
    :param estimators: Names of the estimators; `None`: all.
    :param n_bootstrap: Number of bootstrap samples of the episodes.
    :param min_effective_episodes: Estimates that weight episodes are refused below this effective sample size.
    :param max_unsupported: Largest accepted share of decisions without support in the log.
    :param acted_by: Name of the policy in the decision log of a server whose episodes are used; `None`: all episodes.
    :param estimates: The result of :meth:`run`.
    """

    _section: ClassVar[str] = "runner"
    policies: CollectionOfConfigType
    data: str
    behaviour: str | None = None
    gamma: float = 0.99
    truncation_ends: bool = False
    estimators: Sequence[str] | None = None
    n_bootstrap: int = 200
    min_effective_episodes: float = 50.0
    max_unsupported: float = 0.1
    acted_by: str | None = None
    estimates: list[estimate.PolicyEstimate] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        policies: Any = self.policies or {}
        if policies:
            runners.require_policies(policies)
        self._entries: dict[str, Mapping[str, Any]] = {}
        for name, entry in policies.items():
            runs = runners.runs_of(entry)
            for index, run in enumerate(runs, 1):
                self._entries[str(name) if len(runs) == 1 else f"{name} ({index})"] = run
        if self.behaviour not in (None, CLONED, *self._entries):
            known = f"the name of one of the policies ({', '.join(self._entries)})"
            raise ConfigError(f"{self._section}.behaviour: expected `{CLONED}` or {known}, found {self.behaviour!r}.")

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        use_one_thread()  # small matrices: more threads only compete
        config = estimate.EstimationConfig(
            gamma=self.gamma,
            estimators=tuple(runners.names_of("runner.estimators", self.estimators) or estimate.ESTIMATORS),
            n_bootstrap=self.n_bootstrap,
            min_effective_episodes=self.min_effective_episodes,
            max_unsupported=self.max_unsupported,
            greedy=self.deterministic,
            seed=self.maze_seeding.agent_global_seed,
        )
        entries = self._entries or {"policy": {"policy": runners.ANY_POLICY}}
        logs = {name: self._logged(name, entry) for name, entry in entries.items()}
        if self.behaviour == CLONED:
            for log, _, action_spaces in logs.values():
                log.propensities = estimate.cloned_propensities(log, action_spaces, config.seed)
        elif self.behaviour is not None:
            data, policy, action_spaces = logs[self.behaviour]
            propensities = np.exp(log_probabilities(data, policy, action_spaces))
            if impossible := int((propensities == 0).sum()):
                refuted = f"{self.behaviour} would never have taken {impossible} of the {len(data)} logged actions"
                raise ConfigError(
                    f"{self._section}.behaviour: {refuted}. Name the policy that acted, with its exploration."
                )
            for log, _, _ in logs.values():
                log.propensities = propensities
        data, _, spaces_of_log = next(iter(logs.values()))
        found = estimate.estimate({}, data, spaces_of_log, config) if self._entries else []
        for name in self._entries:
            seen, policy, action_spaces = logs[name]
            try:
                found += estimate.estimate({name: policy}, seen, action_spaces, config)[1:]
            except ConfigError as error:
                found += self._refused(name, error, config)
        self.estimates = found
        facts = log_facts(data, is_cloned=self.behaviour == CLONED)
        print("\n".join(f"{name}: {text}" for name, text in facts), flush=True)
        if found:
            print(f"Discounted returns (runner.gamma={self.gamma:g}):", flush=True)
            print("\n".join(aligned([_HEADER, *(_cells(entry) for entry in found)])), flush=True)
        for text in dict.fromkeys(entry.refusal for entry in found if entry.refusal):
            print(f"Refused: {text}", flush=True)
        runners.write_files({PAGE_FILE: estimation_page(found, data, facts).text(), ESTIMATES_FILE: _as_csv(found)})

    def _refused(self, name: str, error: ConfigError, config: estimate.EstimationConfig) -> list[Any]:
        """Return the rows of a policy that cannot be estimated."""
        nothing = Estimate(np.nan, np.nan, np.nan), None, np.nan, np.nan, np.nan, str(error)
        return [estimate.PolicyEstimate(name, each, *nothing) for each in config.estimators]

    def _logged(self, name: str, entry: Mapping[str, Any]) -> tuple[LoggedSteps, Any, Any]:
        """Return the log as the policy of an entry observes it, the policy and the action spaces."""
        env, policy = self.built(entry, name=name)
        with closing(env):
            processor = CompleteTrajectoryProcessor(self.acted_by)
            dataset = InMemoryDataset(self.data, conversion_env_factory=lambda: env, trajectory_processor=processor)
            if self.acted_by is not None and not len(dataset):
                raise unknown_key_error(f"{self._section}.acted_by: policy", self.acted_by, sorted(processor.known))
            data = LoggedSteps.of_dataset(dataset)
            data.require_spaces(env.observation_spaces_dict, env.action_spaces_dict)
            return data.ended_by_truncations() if self.truncation_ends else data, policy, env.action_spaces_dict


_JUDGES = ("dr", "wdr", "magic", "fqe", "wpdis", "wis", "pdis", "is")  # estimators of the gate, the preferred one first


@dataclass
class EvidenceGateRunner(EstimationRunner):
    """Release gate on logged episodes: pass if the candidate is shown to be within the margin of the baseline.

    The difference of both estimates is judged by the lower end of its 95 % interval, by bootstrap over the same
    episodes. The estimator is the first of `dr`, `wdr`, `magic`, `fqe` and the estimators by weighting that is refused
    for neither policy. Writes `gate.md` besides the files of the estimation.

    :param margin: Share of the baseline's estimate by which the candidate may be worse.
    """

    _section = "evidence"
    margin: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        number("runner.margin", self.margin)
        policies: Any = self.policies
        for name, entry in policies.items():
            runners.run_of(name, entry)

    @override(EstimationRunner)
    def run(self, **kwargs: Any) -> None:
        super().run(**kwargs)
        passes, text = self._verdict()
        print(text, flush=True)
        runners.write_files({"gate.md": f"# {'Passed' if passes else 'Not passed'}\n\n{text}\n"})
        if not passes:
            raise GateNotPassedError(text)

    @override(EstimationRunner)
    def _refused(self, name: str, error: ConfigError, config: estimate.EstimationConfig) -> NoReturn:
        raise error  # no verdict

    def _verdict(self) -> tuple[bool, str]:
        """Return whether the candidate passes, and the reason in sentences."""
        usable = {(entry.policy, entry.estimator): entry for entry in self.estimates if not entry.refusal}
        for judge in _JUDGES:
            if not {("candidate", judge), ("baseline", judge)} <= usable.keys():
                continue
            candidate, baseline = usable["candidate", judge], usable["baseline", judge]
            low, high = np.quantile(candidate.samples - baseline.samples, (0.025, 0.975))
            tolerated = -self.margin * abs(baseline.estimate.value)
            passes = bool(low >= tolerated)
            return passes, (
                f"{'Passed' if passes else 'Not passed'}: estimated by `{judge}`, the candidate's return differs by "
                f"{candidate.estimate.value - baseline.estimate.value:.4g} from the baseline's, 95 % interval "
                f"[{low:.4g}, {high:.4g}]; at least {tolerated:.4g} is required. The estimate assumes that the log "
                f"holds all that the policies observe and that the plant has not changed since."
            )
        reasons = " ".join(dict.fromkeys(entry.refusal for entry in self.estimates if entry.refusal))
        return False, f"Not passed: no estimator can judge both policies. {reasons}"


def _cells(entry: estimate.PolicyEstimate) -> tuple[str, ...]:
    value = "refused" if entry.refusal else f"{entry.estimate.value:.4g}"
    interval = f"[{entry.estimate.low:.4g}, {entry.estimate.high:.4g}]" if entry.estimate.is_known else ""
    weighting = (entry.effective_episodes, entry.largest_weight, entry.unsupported)
    formats = zip(weighting, ("{:.0f}", "{:.1%}", "{:.0%}"), strict=True)
    shown = ("" if np.isnan(number) else text.format(number) for number, text in formats)
    return (entry.policy, entry.estimator, value, interval, *shown)


def _as_csv(entries: Sequence[estimate.PolicyEstimate]) -> str:
    intervals = ("estimate", "low", "high", "bernstein_low", "bernstein_high")
    rows = [("policy", "estimator", *intervals, "effective_episodes", "largest_weight", "unsupported", "refusal")]
    for entry in entries:
        numbers: tuple[Any, ...] = (*entry.estimate, *(entry.bernstein or ("", "")))
        weighting = (entry.effective_episodes, entry.largest_weight, entry.unsupported)
        rows.append((entry.policy, entry.estimator, *numbers, *weighting, entry.refusal))
    return csv_text(rows)


def log_facts(data: LoggedSteps, is_cloned: bool = False) -> list[tuple[str, str]]:
    """Describe a log: episodes, returns, missing values, actions, the behaviour's entropy, what cannot be estimated.

    :param data: The log.
    :param is_cloned: The probabilities of its actions are estimates.
    """
    continues = "they continue in estimates with fitted values only (`runner.truncation_ends=true`: they end)"
    lengths, returns, n_known = data.lengths, data.returns(), int(np.isfinite(data.propensities).sum())
    of_returns = "mean {:.4g}, median {:.4g}, 5 to 95 %: {:.4g} to {:.4g}; not discounted".format(
        returns.mean(), *np.quantile(returns, (0.5, 0.05, 0.95))
    )
    facts = [
        ("Episodes", str(data.n_episodes)),
        ("Decisions", f"{len(data)} ({lengths.min()} to {lengths.max()} in an episode)"),
        ("Returns", of_returns),
        ("Truncated episodes", f"{n}; {continues}" if (n := int(data.truncated.sum())) else "0"),
        (
            "Probabilities of the actions",
            "estimated by cloning the behaviour; intervals do not contain the error of this"
            if is_cloned
            else f"known for {n_known} of {len(data)} decisions",
        ),
    ]
    if len(set(data.acted_by)) > 1:
        for name in dict.fromkeys(data.acted_by):
            own = returns[np.array(data.acted_by) == name]
            found = Estimate.of(t_interval(own))
            interval = f" (95 %: {found.low:.4g} to {found.high:.4g})" if found.is_known else ""
            facts.append((f"Returns of {name or 'others'}", f"mean {found.value:.4g}{interval} in {len(own)} episodes"))
    for key, decisions in data.tables.items():
        for head, actions in decisions.actions.items():
            if actions.dtype.kind == "i" and actions.ndim == 1:
                choices, counts = np.unique(actions, return_counts=True)
                shares = zip(choices.tolist(), (counts / len(actions)).tolist(), strict=True)
                rarest = f"{len(choices)} different; the rarest in {counts.min() / len(actions):.2%} of the decisions"
                text = rarest if len(choices) > 12 else ", ".join(f"{choice} {share:.2%}" for choice, share in shares)
                facts.append((f"Actions, sub-step {key}, {head}", text))
        known = data.propensities[data.positions(key)]
        known = known[np.isfinite(known)]
        if len(known):
            entropy = f"{0.0 - np.log(known).mean():.3g} nats; smallest probability {known.min():.2g}"
            facts.append((f"Behaviour's entropy, sub-step {key}", entropy))
    if n_known < len(data):
        facts.append(("Not estimated", "all estimators with weights: probabilities of actions are missing"))
    elif (data.propensities == 1.0).all():
        facts.append(("Not estimated", "other policies: the behaviour is deterministic; log with exploration"))
    if n_lost := int((~data.has_target).sum()):
        facts.append(("Left out of fitted values", f"{n_lost} decisions before truncations without an observation"))
    return facts


def _label(entry: estimate.PolicyEstimate, data: LoggedSteps) -> str:
    """Return the name of an estimate; fitted values contain what follows truncations, weighted returns do not."""
    if entry.policy == estimate.BEHAVIOUR:
        return "logged episodes"
    is_beyond = entry.estimator in estimate.FITTED and data.truncated.any()
    return f"{entry.estimator}, beyond truncations" if is_beyond else entry.estimator


def estimation_page(entries: Sequence[estimate.PolicyEstimate], log: LoggedSteps, facts: list[tuple[str, str]]) -> Page:
    """Build the HTML report: estimates of each policy beside the return of the log.

    :param entries: The estimates.
    :param log: The log.
    :param facts: Its description.
    """
    policies = [name for name in dict.fromkeys(entry.policy for entry in entries) if name != estimate.BEHAVIOUR]
    names = " / ".join(policies) if len(policies) <= 4 else f"{len(policies)} policies"
    sections = [page_section("Log", facts=fact_list(facts))]
    for policy in policies:
        own = {_label(entry, log): entry for entry in entries if entry.policy in (policy, estimate.BEHAVIOUR)}
        shown = [(label, entry.estimate) for label, entry in own.items() if not entry.refusal]
        figure = intervals_figure("Estimates, with 95 % intervals", shown, [np.empty(0)] * len(shown), None)
        rows = [(label, *_cells(entry)[2:], entry.refusal) for label, entry in own.items()]
        facts_of_policy = table((*_HEADER[1:], "refused because"), rows)
        sections.append(page_section(policy, f'<div class="pair">{figure}</div>', facts=facts_of_policy))
    return Page(
        title="Estimates of " + names if policies else "Logged episodes",
        subtitle=f"discounted return of an episode, estimated from {log.n_episodes} logged episodes",
        note=f"written {datetime.now():%Y-%m-%d %H:%M:%S}; 95 % intervals by bootstrap over episodes; effective "
        "episodes: number of equally weighted episodes that the weighted ones are worth (Kish 1965)",
        sections=sections,
    )
