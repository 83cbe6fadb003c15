"""The gate: what passes, what does not, and what a command says of it."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.core.agent.policy import Policy
from maze.core.errors import ConfigError
from maze.evaluation.comparison import PlayedEpisodes
from maze.evaluation.gate import LESS, MIN_EPISODES, MORE, Gate, Threshold, read_thresholds, tail_thresholds, with_tails
from maze.maze_cli import main

HOSTILE = "a|b</td><img src=x onerror=alert(1)>"


def played(**measures: Any) -> PlayedEpisodes:
    return PlayedEpisodes("some", {name: np.atleast_2d(np.asarray(each, float)) for name, each in measures.items()})


def gate(ours: Any, theirs: Any, threshold: Threshold | None = None) -> Gate:
    """One measure of a baseline and of a candidate."""
    return Gate(played(**{"return": ours}), played(**{"return": theirs}), {"return": threshold or Threshold()})


N = MIN_EPISODES
EASY_AND_HARD = np.linspace(10.0, 90.0, N)  # mean 50: 2 % of it is 1


@pytest.mark.parametrize(
    ("shift", "threshold", "result"),
    [
        (0.0, Threshold(), "passed"),
        (-0.9, Threshold(), "passed"),
        (-1.0, Threshold(), "undecided"),  # 2 % of a mean that is uncertain
        (-1.2, Threshold(), "worse"),
        (1.2, Threshold(LESS), "worse"),
        (-30.0, Threshold(LESS), "passed"),
        (-1.2, Threshold(absolute_margin=1.2), "passed"),  # the interval of equal differences is a point
        (-1.2, Threshold(absolute_margin=1.1), "worse"),
        (0.0, Threshold(margin=0.0), "passed"),
        (0.8, Threshold(margin=-0.02), "worse"),  # it has to be better by 1
        (1.2, Threshold(margin=-0.02), "passed"),
        (0.0, Threshold(limit=200.0), "beyond the limit"),
        (0.0, Threshold(LESS, limit=200.0), "passed"),
        (0.0, Threshold(limit=50.5), "limit undecided"),
        (
            0.0,
            Threshold(range=(0.0, 100.0)),
            "undecided",
        ),  # a difference of -100 in 1.8 % of the episodes may be unseen
        (0.0, Threshold(margin=0.04, range=(0.0, 100.0)), "passed"),
    ],
)
def test_a_measure_passes_that_is_not_worse_than_tolerated(shift: float, threshold: Threshold, result: str) -> None:
    found = gate(EASY_AND_HARD, EASY_AND_HARD + shift, threshold)
    assert found.judged[0].verdict == result
    assert found.passes == (result == "passed")


def test_undecided_measures_fail() -> None:
    noise = np.tile([18.0, -18.0], N // 2)
    found = gate(EASY_AND_HARD, EASY_AND_HARD + noise)
    assert found.judged[0].verdict == "undecided"
    assert not found.passes


@pytest.mark.parametrize("threshold", [Threshold(absolute_margin=1.0), Threshold()])
@pytest.mark.parametrize("noise", [0.1, 2.0])
def test_a_policy_at_the_margin_passes_as_rarely_as_promised(threshold: Threshold, noise: float) -> None:
    """Its true mean is worse by exactly what is tolerated, a constant or 2 % of a mean that is estimated."""
    rng = np.random.default_rng(7)
    n_passed = 0
    for _ in range(120):
        baseline = rng.normal(50.0, 20.0, N)
        n_passed += gate(baseline, baseline - 1.0 + rng.normal(0.0, noise, N), threshold).passes
    assert n_passed <= 8


def test_the_gate_is_undecided_after_too_few_episodes() -> None:
    with pytest.raises(ConfigError, match=r"at least 200 to judge return, found 1\..*range"):
        gate([100.0], [98.0])
    with pytest.raises(ConfigError, match="found 199"):
        gate(EASY_AND_HARD[1:], EASY_AND_HARD[1:])


def test_a_known_range_has_a_valid_interval_after_any_number_of_episodes() -> None:
    """Of one episode with the value 100, the mean is at least 2.5 % of the range, and no more is known."""
    assert not gate([100.0], [98.0], Threshold(range=(0.0, 100.0))).passes
    assert gate([100.0], [98.0], Threshold(limit=2.0, absolute_margin=200.0, range=(0.0, 100.0))).passes
    assert not gate([100.0], [98.0], Threshold(limit=3.0, absolute_margin=200.0, range=(0.0, 100.0))).passes
    with pytest.raises(ConfigError, match=r"thresholds\.return\.range: the episodes have values from 98 to 100"):
        gate([100.0], [98.0], Threshold(range=(0.0, 99.0)))


def test_losses_that_need_not_have_occurred_are_remarked() -> None:
    """0.982^200 and 0.999^3688 are 2.5 %."""
    text = gate(EASY_AND_HARD, EASY_AND_HARD).text()
    assert "fewer than 0.018 of the episodes may be missing in these 200; one in a thousand needs 3,688" in text


def test_the_gate_requires_every_judged_measure_to_pass_and_no_other() -> None:
    ours = played(**{"return": EASY_AND_HARD, "steps": EASY_AND_HARD, "waste": EASY_AND_HARD, "speed": EASY_AND_HARD})
    theirs = played(**{"return": EASY_AND_HARD, "steps": [1.0] * N, "waste": EASY_AND_HARD + 5, "speed": [0.0] * N})
    assert Gate(ours, theirs, read_thresholds({})).passes, "the others have no goal"
    judged = Gate(ours, theirs, read_thresholds({}, minimize=["waste"]))
    assert {each.measure: each.verdict for each in judged.judged} == {
        "return": "passed",
        "steps": "not judged",
        "waste": "worse",
        "speed": "not judged",
    }
    assert judged.verdict == "The candidate does not pass: waste (worse)."
    assert "no goal is stated: speed" in judged.text()
    assert Gate(ours, theirs, read_thresholds({"return": {"goal": "none"}}, minimize=["speed"])).passes
    assert judged.comparison.goal("waste") == " (less is better)"
    assert judged.comparison.goal("speed") == ""


def test_nan_returns_do_not_pass_the_gate() -> None:
    assert not gate(EASY_AND_HARD, np.where(EASY_AND_HARD > 80, np.nan, EASY_AND_HARD)).passes


def test_thresholds_come_with_defaults() -> None:
    found = read_thresholds(
        {
            "return": {"margin": 0.05},
            "waste": {"goal": LESS, "absolute_margin": 3},
            "late": {"limit": 1, "range": [0, 9]},
        },
        minimize=["late"],
        maximize=["speed"],
        margin=0.01,
    )
    assert found == {
        "return": Threshold(MORE, 0.05),
        "waste": Threshold(LESS, 0.01, 3.0),
        "late": Threshold(LESS, 0.01, None, 1.0, (0.0, 9.0)),
        "speed": Threshold(MORE, 0.01),
    }
    assert found["waste"].tolerated(50.0) == 3.0
    assert found["return"].tolerated(-50.0) == 2.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"waste": {"margin": 0.1}}, "thresholds.waste.goal: expected more or less"),
        ({"waste": {"goal": "fewer"}}, "Found 'fewer'"),
        ({"return": 0.1}, "expected a mapping such as {goal: less, margin: 0.01}, found 0.1"),
        ({"return": {"margn": 0.1}}, "Did you mean `margin`?"),
        ({"return": {"margin": "2%"}}, "thresholds.return.margin: expected a number"),
        ({"return": {"margin": float("nan")}}, "expected a number"),
        ({"return": {"margin": 0.1, "absolute_margin": 1}}, "exclude each other"),
        ({"return": {"range": 500}}, "thresholds.return.range: expected the smallest and the largest value"),
        ({"return": {"range": [0, "x"]}}, "thresholds.return.range: expected a number"),
        ({"return": {"range": [5, 0]}}, "expected the smallest value first"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_thresholds(config)
    assert message in str(error.value)


def test_the_tail_of_each_judged_measure_is_judged_unless_it_is_configured() -> None:
    config = {"waste": {"goal": "less", "margin": 0.1, "limit": 9.0}, "time_cvar": {"goal": "less"}}
    found = tail_thresholds(read_thresholds(config, minimize=["time"]), config)
    assert found["waste_cvar"] == Threshold(LESS, 0.1)
    assert found["return_cvar"] == Threshold()
    assert list(found) == ["return", "time", "waste", "time_cvar", "return_cvar", "waste_cvar"]
    config = {"return_cvar": {"margin": 0.3}, "waste_cvar": {"absolute_margin": 2}}  # with the goals of their measures
    expected = {"return_cvar": Threshold(MORE, 0.3), "waste_cvar": Threshold(LESS, absolute_margin=2.0)}
    assert read_thresholds(config, minimize=["waste"]).items() >= expected.items()
    assert "return_cvar" not in tail_thresholds(read_thresholds({}), {"return_cvar": {"goal": "none"}})


def test_rare_losses_fail_the_tail_where_means_are_equal() -> None:
    usual = np.linspace(90.0, 110.0, 1000)
    rare = usual + 4.0
    rare[::50] -= 200.0  # the mean stays as it was
    thresholds = {"return": Threshold(margin=0.2), "return_cvar": Threshold(margin=0.2)}
    policies = [with_tails(played(**{"return": each}), 0.1, thresholds) for each in (usual, rare)]
    found = {each.measure: each for each in Gate(*policies, thresholds).judged}
    assert found["return"].result == "passed"
    assert found["return_cvar"].result == "worse"
    assert found["return_cvar"].baseline.value == pytest.approx(np.sort(usual)[:100].mean())
    less = {"waste_cvar": Threshold(LESS)}
    tail = with_tails(played(waste=usual), 0.1, less).measures["waste_cvar"]
    assert tail.mean() == pytest.approx(np.sort(usual)[-100:].mean()), "the largest are the worst"


def test_a_goal_is_stated_once_and_names_what_is_there() -> None:
    with pytest.raises(ConfigError, match="both name waste"):
        read_thresholds({}, ["waste"], ["waste"])
    ours = played(**{"return": EASY_AND_HARD, "waste": EASY_AND_HARD})
    with pytest.raises(ConfigError, match=r"no measure wast\. Did you mean `waste`"):
        Gate(ours, ours, read_thresholds({}, ["wast"]))
    with pytest.raises(ConfigError, match="no measure has a goal"):
        Gate(ours, ours, read_thresholds({"return": {"goal": "none"}}))


def test_a_canary_share_of_0_causes_a_warning() -> None:
    around_zero = np.tile([1.0, -1.0], N // 2)
    found = gate(around_zero, around_zero)
    assert found.passes
    assert "set thresholds.return.absolute_margin" in found.text()


def test_names_stay_text_in_markdown() -> None:
    ours = played(**{"return": EASY_AND_HARD, HOSTILE: EASY_AND_HARD})
    text = Gate(ours, ours).markdown([HOSTILE])
    assert all(line.startswith("    ") for line in text.splitlines()[2:]), "a block of code"


# -- the command ------------------------------------------------------------------------------------------------


class WorseAtTimes(Policy):
    """Balances CartPole, but for a share of its decisions."""

    def __init__(self, share: float) -> None:
        self.share, self.rng = share, np.random.default_rng(0)

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def compute_action(
        self, observation: Any, maze_state: Any, env: Any, actor_id: Any = None, deterministic: bool = False
    ) -> dict[str, int]:
        angle, speed = observation["observation"][2:]
        return {"action": int(angle + 0.3 * speed > 0) ^ int(self.rng.random() < self.share)}


SLIPS = f"{{_target_:{__name__}.WorseAtTimes,share:%s}}"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    fixed = ("env.name=CartPole-v1", "seeding.env_base_seed=1", "seeding.agent_base_seed=2")
    return main(["-cn", "conf_gate", *fixed, "runner.max_episode_steps=30", "hydra.run.dir=gate", *arguments])


def test_the_worst_episodes_are_judged_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    policies = (f"candidate={SLIPS % 0.5}", f"baseline={SLIPS % 0.3}")
    assert run(*policies, "runner.risk=0.1", "thresholds={return:{margin:9},return_cvar:{margin:0.02}}") == 1
    assert "The candidate does not pass: return_cvar (worse)." in capsys.readouterr().err
    with Path("gate/tails.csv").open(encoding="utf-8", newline="") as file:
        assert {row["level"] for row in csv.DictReader(file)} == {"0.1"}


def test_the_same_policy_passes_and_a_worse_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    for share, status, result in ((0.3, 0, "passed"), (0.5, 1, "worse")):
        shutil.rmtree("gate", ignore_errors=True)
        assert run(f"candidate={SLIPS % share}", f"baseline={SLIPS % 0.3}") == status
        shown = capsys.readouterr()
        assert result in shown.out
        assert ("GateNotPassedError: The candidate does not pass: return (worse)." in shown.err) == bool(status)
        markdown = Path("gate/gate.md").read_text(encoding="utf-8")
        assert markdown.startswith(f"# Gate: {'not ' * status}passed")
        assert f"{N} episodes, the same for both" in markdown
        page = Path("gate/report.html").read_text(encoding="utf-8")
        assert "<h2>Verdict</h2>" in page
        assert f'<span class="state {"failed" if status else "passed"}">' in page
        with Path("gate/comparison.csv").open(encoding="utf-8", newline="") as file:
            assert [row["policy"] for row in csv.DictReader(file)][:2] == ["baseline", "candidate"]


def test_thresholds_come_from_a_file_or_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    policies = (f"candidate={SLIPS % 0.5}", f"baseline={SLIPS % 0.3}")
    Path("gate.yaml").write_text("return: {margin: 0.9, limit: 5}\n")
    assert run(*policies, "thresholds=gate.yaml") == 0
    assert ", limit 5" in capsys.readouterr().out
    assert run(*policies, "thresholds={return:{margin:0.9,limit:60}}", "hydra.run.dir=second") == 1
    assert "return (beyond the limit)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "baseline: expected a training run, a bundle or an option of policy"),
        (["baseline=random"], "candidate: expected a training run"),
        (["baseline=random", "candidate=randon"], "baseline or candidate: randon is neither an option of policy"),
        (["baseline=random", "candidate=new.maze"], "there is no file"),
        (["baseline=random", "candidate={_target_: gymnasium.Nope}"], "candidate: `gymnasium.Nope` does not exist"),
        (["baseline=random", "candidate=damaged.maze"], "not a complete policy bundle"),
        (["baseline=random", "candidate=random", "thresholds=nothing.yaml"], "There is no configuration file"),
        (["baseline=random", "candidate=random", "thresholds=damaged.maze"], "thresholds: "),
        (["baseline=random", "candidate=random", "thresholds=7"], "thresholds: "),
        (["baseline=random", "candidate=random", "runner.n_episodes=1"], "runner.n_episodes: expected a whole number"),
        (["baseline=random", "candidate=random", "runner.n_episodes=199"], "runner.n_episodes: expected at least 200"),
        (["baseline=random", "candidate=random", "runner.minimize=[wast]"], "The episodes have no measure wast"),
        (["baseline=random", "candidate=random", "runner.margin=much"], "runner.margin: expected a number"),
        (["baseline=random", "candidate=random", "hydra.run.dir=damaged.maze"], "is a file"),
        (["baseline=random", "candidate=dummy_cartpole", "env.name=Pendulum-v1"], "ValueError"),
    ],
)
def test_status_2_means_that_there_is_no_verdict(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("damaged.maze").write_text("return: [")
    assert run("runner.max_episode_steps=2", *arguments) == 2
    assert message in capsys.readouterr().err


STACK = "{observation:observation,keep_original:false,tag:null,delta:false,stack_steps:3}"
TRAIN = (
    *("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", "algorithm.n_epochs=1", "algorithm.epoch_length=1"),
    *("algorithm.n_rollout_steps=4", "runner.concurrency=2", "algorithm.rollout_evaluator.n_episodes=1"),
    "+wrappers.RewardScalingWrapper.scale=0.5",
    f"+wrappers.ObservationStackWrapper.stack_config=[{STACK}]",
    "+wrappers.StepSkipWrapper={n_steps:2,skip_mode:sticky}",
    "+wrappers.TimeLimitWrapper.max_episode_steps=40",
)


@pytest.mark.long
def test_a_bundle_acts_as_the_run_it_was_exported_from(capsys: pytest.CaptureFixture[str]) -> None:
    """It brings its own observations, and the run's rewards and limits hold for it; also for a heuristic."""
    assert main([*TRAIN, "hydra.run.dir=trained"]) == 0
    assert main(["--export", "trained", "--out", "policy.maze", "--steps", "100"]) == 0
    for number, deterministic in enumerate(("true", "false")):
        settings = (f"runner.deterministic={deterministic}", "thresholds={steps:{goal:more,margin:0}}")
        assert run("candidate=policy.maze", "baseline=trained", *settings, f"hydra.run.dir=gate_{number}") == 0
        with Path(f"gate_{number}/episodes.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["return"] for row in rows[:N]] == [row["return"] for row in rows[N:]]
        assert all(0 < float(row["return"]) <= 20.0 for row in rows)
    capsys.readouterr()
    limited = ("thresholds={return:{limit:20}}", "runner.max_episode_steps=60")
    assert run("candidate=dummy_cartpole", "baseline=trained", *limited) == 0
    assert run("candidate=trained", "baseline=random", "wrappers=default", "hydra.run.dir=other") == 2
