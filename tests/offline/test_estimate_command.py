"""`maze-run -cn conf_estimate` on a recorded rollout."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from maze.maze_cli import main

CARTPOLE = "maze.core.agent.dummy_cartpole_policy.DummyCartPolePolicy"
OLD = "{base: dummy_cartpole, epsilon: 0.5}"


@pytest.mark.long
def test_a_recorded_rollout_is_evaluated_for_other_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    record = ["policy=exploring", "policy.base=dummy_cartpole", "policy.epsilon=0.5"]
    runner = ["runner=sequential", "runner.n_episodes=80", "runner.max_episode_steps=4"]
    common = ["env.name=CartPole-v1", "log_base_dir=log", "seeding.env_base_seed=1", "seeding.agent_base_seed=2"]
    assert main(["-cn", "conf_rollout", *common, *record, *runner, "runner.record_trajectory=true"]) == 0
    run = next(Path("log").glob("*/*/trajectory_data")).parent
    command = ["-cn", "conf_estimate", *common, f"data={run}", "runner.n_bootstrap=20"]
    capfd.readouterr()
    policies = f"policies={{old: {OLD}, random: random, cautious: {{_target_: {CARTPOLE}}}}}"
    assert main([*command, policies, "behaviour=old", "runner.gamma=1.0", "runner.min_effective_episodes=20"]) == 0
    out = capfd.readouterr().out
    assert "Returns: mean 4, median 4, 5 to 95 %: 4 to 4; not discounted" in out
    assert "Discounted returns (runner.gamma=1):" in out
    assert "Probabilities of the actions: known for 320 of 320 decisions" in out
    entropy = float(out.partition("Behaviour's entropy, sub-step 0: ")[2].partition(" ")[0])
    assert entropy == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25), abs=0.12)
    text = next(Path("log").glob("estimate*/*/estimates.csv")).read_text()
    rows = list(csv.DictReader(text.splitlines()))
    found = {(row["policy"], row["estimator"]): row for row in rows}
    assert float(found["old", "is"]["estimate"]) == pytest.approx(4.0)  # four steps, reward 1 each
    assert float(found["random", "pdis"]["low"]) <= 4.0 <= float(found["random", "pdis"]["high"])
    assert float(found["cautious", "wis"]["effective_episodes"]) == pytest.approx(
        80 * 0.75**4, abs=13
    )  # three standard deviations
    page = next(Path("log").glob("estimate*/*/report.html")).read_text()
    assert "80" in page
    assert "fqe, beyond truncations" in page
    assert "pdis, beyond truncations" not in page
    assert main([*command, policies, "behaviour=old", "runner.estimators=[wis]"]) == 0
    assert "Refused: The weighted episodes are worth" in capfd.readouterr().out
    evidence = f"evidence={{data: {run}, behaviour: baseline, gamma: 1.0, estimators: [pdis]}}"
    gate = ["-cn", "conf_gate", *common, f"baseline={OLD}", evidence]
    assert main([*gate, f"candidate={OLD}"]) == 0
    assert "Passed: estimated by `pdis`" in next(Path("log").glob("gate*/*/gate.md")).read_text()
    capfd.readouterr()
    assert main([*gate, f"candidate={{_target_: {CARTPOLE}}}"]) == 1
    assert "no estimator can judge both policies" in capfd.readouterr().err
    several = f"[{OLD}, {{base: dummy_cartpole, epsilon: 0.4}}]"
    assert main([*command, f"policies={{old: {OLD}, new: {several}}}", "behaviour=old", "runner.estimators=pdis"]) == 0
    assert re.findall(r"^ *(new \S+) +pdis", capfd.readouterr().out, re.MULTILINE) == ["new (1)", "new (2)"]
    assert main([*gate, f"candidate={several}"]) in (1, 2)
    assert "candidate: expected one run, found 2" in capfd.readouterr().err
    assert main([*command, policies, "behaviour=older"]) == 1
    assert "the name of one of the policies (old, random, cautious), found 'older'" in capfd.readouterr().err
    assert main([*command, policies, "behaviour=cautious"]) == 1
    assert "runner.behaviour: cautious would never have taken" in capfd.readouterr().err
    measures = "runner.risk=0.1", "runner.minimize=[waste]", "thresholds={return: {limit: 9}}"
    for ignored in (*measures, "runner.deterministic=true", "runner.n_episodes=300"):
        assert main([*gate, f"candidate={OLD}", ignored]) == 2
        assert ignored.split("=")[0] in capfd.readouterr().err
    assert main([*gate[:-1], evidence.replace("baseline", "older"), f"candidate={OLD}"]) == 2
    assert "evidence.behaviour: expected `cloned` or the name of one of the" in capfd.readouterr().err


def test_a_log_is_described_without_policies_and_its_propensities_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["env.name=CartPole-v1", "log_base_dir=log", "seeding.env_base_seed=1", "seeding.agent_base_seed=2"]
    runner = ["runner=sequential", "runner.n_episodes=200", "runner.max_episode_steps=3"]
    record = ["policy=random_policy", "runner.record_trajectory=true"]
    assert main(["-cn", "conf_rollout", *common, *record, *runner]) == 0
    run = next(Path("log").glob("*/*/trajectory_data")).parent
    command = ["-cn", "conf_estimate", *common, f"data={run}"]
    capfd.readouterr()
    assert main([*command, "policies=[]"]) == 0
    out = capfd.readouterr().out
    assert "Episodes: 200" in out
    share = float(out.partition("Actions, sub-step 0, action: 0 ")[2].partition("%")[0])
    assert share == pytest.approx(50.0, abs=7.0)
    assert "probabilities of actions are missing" in out
    assert main([*command, "policies=[]", "runner.acted_by=old"]) == 1
    assert "runner.acted_by: policy 'old' is unknown" in capfd.readouterr().err
    policies = "policies={planned: {base: random_policy}, random: random_policy}"
    assert main([*command, policies, "behaviour=cloned", "runner.estimators=[wis]"]) == 0
    out = capfd.readouterr().out
    assert "estimated by cloning" in out
    assert re.search(r"^ *planned +wis +refused *$", out, re.MULTILINE)
    assert re.search(r"^ *random +wis +\d", out, re.MULTILINE), "a refused policy leaves the estimates of the others"
    assert re.search("^Refused: .*needs the simulator", out, re.MULTILINE)
    entropy = float(out.partition("Behaviour's entropy, sub-step 0: ")[2].partition(" ")[0])
    assert entropy == pytest.approx(np.log(2.0), abs=0.06)
    assert out.count("Refused") == 1
