"""Tables of operations problems: what is trained is not trained again, and pages get what was found."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import job_shop, operations
from benchmarks.page_tables import markdown_table, rows_of, write_table
from maze_envs.scheduling import taillard
from maze_envs.scheduling.rules import DispatchingRule


@pytest.fixture
def trained(monkeypatch):
    """Requested runs; none is executed."""
    done = []

    def run(command, **_):
        done.append(command)
        (operations.Path(command[-1].removeprefix("hydra.run.dir="))).mkdir(parents=True)
        return type("Finished", (), {"returncode": 0})()

    monkeypatch.setattr(operations.subprocess, "run", run)
    return done


def test_finished_runs_are_reused_and_never_confused_with_others(tmp_path, trained):
    one = operations.Training("lost_sales_ppo", tmp_path / "one", 3, ("env.penalty=4",))
    operations.train(one)
    operations.train(one)
    expected = ["-cn", "conf_train", "+experiment=lost_sales_ppo", "env.penalty=4"]
    assert [command[3:7] for command in trained] == [expected]
    assert operations.seconds_of(one) >= 0
    (tmp_path / "one" / operations.FINISHED).unlink()  # interrupted
    operations.train(one)
    assert len(trained) == 2
    with pytest.raises(SystemExit, match=r"was trained with .*penalty=4; expected .*penalty=9"):
        operations.train(operations.Training("lost_sales_ppo", tmp_path / "one", 3, ("env.penalty=9",)))


def test_rows_and_intervals_match_hand_worked_values():
    row = operations.Row("poisson,4,4", 4.0, {"base-stock": 5.0}, [4.0, 4.2, 4.4], [60.0, 61.0, 62.0])
    # the standard deviation is 0.2, the t quantile of two degrees of freedom 4.30
    assert row.cells() == ["poisson,4,4", "4.000", "base-stock 5.000", "", "4.200 ± 0.497", "+5.00 %", "61", "3"]
    assert operations.Row("B.M.", 2.0, {}).cells() == ["B.M.", "2.000", "", "", "", "", "", "0"]
    found = job_shop.cells("trained, greedy", {"15x15": [15.0, 16.0, 17.0]}, ["15x15", "20x20"])
    assert found == ["trained, greedy", "16.0 ± 2.5", "", "3"]


def test_a_documentation_page_gets_its_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: one -->\nold\n<!-- end -->\n<!-- results: two -->\n\n<!-- end -->\n")
    for _ in range(2):
        write_table(page, "one", markdown_table(["a", "b"], [["1", "2"]]))
    table = "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert page.read_text() == (
        f"before\n<!-- results: one -->\n\n{table}\n\n<!-- end -->\n<!-- results: two -->\n\n<!-- end -->\n"
    )
    with pytest.raises(SystemExit, match="expected the lines `<!-- results: three -->`"):
        write_table(page, "three", table)


def test_default_settings_stay_on_the_page(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("<!-- results: some -->\n\n<!-- end -->\n")
    assert rows_of(page, "some", operations.HEADER) == {}

    def of_setting(setting, seeds, directory, overrides):
        yield []
        return operations.Row(setting, 2.0, {}, published=overrides[0] if overrides else "")

    monkeypatch.setitem(operations.PROBLEMS, "some", (of_setting, ["one", "two", "three"]))
    for arguments in (["three", "two"], ["one", "two", "--overrides", "again"]):
        command = ["operations.py", "some", f"--markdown={page}", "--settings", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        operations.main()
    rows = rows_of(page, "some", operations.HEADER)
    assert list(rows) == ["one", "two", "three"]
    assert [row[3] for row in rows.values()] == ["again", "again", ""]
    assert rows["three"] == operations.Row("three", 2.0, {}).cells()


def test_the_command_writes_heuristics_into_the_page(tmp_path, monkeypatch):
    page, results = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("<!-- results: gaps -->\n\n<!-- end -->\n")
    monkeypatch.setattr(job_shop, "RULES", {"MWKR": None})
    monkeypatch.setattr(job_shop, "by_cp_sat", lambda size, seconds: {f"CP-SAT, {seconds:g} s": 1.5})
    command = ["job_shop.py", "--sizes", "15x15", "--cp-sat", "2", f"--markdown={page}", f"--json={results}"]
    monkeypatch.setattr(sys, "argv", command)
    job_shop.main()
    assert "| MWKR | 19.2 |\n| CP-SAT, 2 s | 1.5 |" in page.read_text()
    assert json.loads(results.read_text())["CP-SAT, 2 s"] == {"15x15": [1.5]}


def test_the_cost_of_schedules_without_waiting_is_that_of_exact_optima(monkeypatch):
    pytest.importorskip("ortools")
    # optima of four jobs on three machines with and without waiting: exhaustive search of the environment's decisions
    shops = [taillard.Instance(f"{seed}", *taillard.generate(4, 3, seed, seed + 100), 0) for seed in (104, 105, 107)]
    monkeypatch.setattr(job_shop, "random_instances", lambda size, number: shops[:number])
    found = job_shop.waiting(["4x3"], 5.0, 3).splitlines()[-1]
    gaps = [100 * (332 / 305 - 1), 100 * (302 / 265 - 1), 0.0]
    mean = f"{sum(gaps) / 3:.1f}"
    assert found == f"| 4x3 | 3 | 3 | {mean} (0.0 to {max(gaps):.1f}) | {mean} |"


def test_a_search_keeps_its_time_and_the_best_schedule():
    (one,) = taillard.instances_of("ta01")
    greedy, best, n_samples, spent = job_shop.search_in_time(DispatchingRule("MWKR"), one, 2.0)
    assert greedy == best  # a heuristic repeats its schedule
    assert n_samples >= 64
    assert spent < 3.0
