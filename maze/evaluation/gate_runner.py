"""The gate in front of a rollout: a candidate plays the episodes of a baseline, and passes or does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.errors import ConfigError, GateNotPassedError
from maze.evaluation.comparison import RETURN, Comparison, PlayedEpisodes
from maze.evaluation.comparison_page import comparison_page
from maze.evaluation.comparison_runner import PAGE_FILE, ComparisonRunner
from maze.evaluation.gate import HOW_IT_IS_JUDGED, MARGIN, MIN_EPISODES, Gate, read_thresholds, require_episodes
from maze.report.page import fact_list, page_section, table
from maze.runner import Runner

if TYPE_CHECKING:
    from omegaconf import DictConfig

MARKDOWN_FILE = "gate.md"


@dataclass
class GateRunner(ComparisonRunner):
    """Plays the same episodes with a candidate and a baseline, and fails unless the candidate is good enough.

    Writes what a comparison writes, with the verdict in front, and `gate.md`.

    :param policies: The baseline and the candidate, in this order, as those of a comparison.
    :param n_episodes: Number of episodes.
    :param margin: By which share of the baseline's mean the candidate may be worse.
    :param thresholds: What is tolerated of single measures, see :func:`maze.evaluation.gate.read_thresholds`.
    """

    n_episodes: int = MIN_EPISODES
    margin: float = MARGIN
    thresholds: Mapping[str, Any] | None = None
    gate: Gate | None = field(default=None, init=False)
    """The result, once the episodes have been played."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.policies) != 2:
            raise ConfigError(f"policies: a gate takes a baseline and a candidate, found {len(self.policies)}.")
        self._thresholds = read_thresholds(self.thresholds or {}, self.minimize, self.maximize, self.margin)
        require_episodes(self.n_episodes, self._thresholds)

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        names = {name: cfg.get(str(name)) for name in self.policies}
        self._facts = [f"{name}: {what}" for name, what in names.items() if what is not None]
        seeds = cfg.get("seeding") or {}
        self._facts.append(
            f"{self.n_episodes} episodes, the same for both (seeding.env_base_seed={seeds.get('env_base_seed')} "
            f"seeding.agent_base_seed={seeds.get('agent_base_seed')})"
        )

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        super().run(**kwargs)
        assert self.gate is not None, "it was compared"
        if not self.gate.passes:
            raise GateNotPassedError(self.gate.verdict)

    @override(ComparisonRunner)
    def _compared(self, played: Sequence[PlayedEpisodes]) -> Comparison:
        baseline, candidate = played
        ours, theirs = (self._rewards[each.name] for each in (baseline, candidate))
        if RETURN in self._thresholds and ours != theirs:
            raise ConfigError(
                f"The returns cannot be compared: wrappers change the rewards of the baseline by {ours or 'nothing'}, "
                f"those of the candidate by {theirs or 'nothing'}. Name the wrappers of both (wrappers=<option>), or "
                f"judge KPIs alone: 'thresholds={{{RETURN}: {{goal: none}}}}' and runner.minimize or runner.maximize."
            )
        self.gate = Gate(baseline, candidate, self._thresholds)
        return self.gate.comparison

    @override(ComparisonRunner)
    def _said(self, comparison: Comparison) -> str:
        assert self.gate is not None
        return self.gate.text()

    @override(ComparisonRunner)
    def _files(self, comparison: Comparison) -> dict[str, str]:
        gate = self.gate
        assert gate is not None
        compared = comparison_page(comparison, datetime.now())
        verdict = page_section(
            "Verdict",
            table(gate.HEADER, gate.rows(), gate.verdict),
            facts=f"<p>{HOW_IT_IS_JUDGED}</p>" + fact_list(("to know", each) for each in gate.remarks()),
        )
        page = replace(
            compared,
            subtitle="; ".join(self._facts),
            sections=[verdict, *compared.sections],
            state="passed" if gate.passes else "failed",
        )
        return {MARKDOWN_FILE: gate.markdown(self._facts), **super()._files(comparison), PAGE_FILE: page.text()}
