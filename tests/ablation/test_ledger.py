"""The ledger of an ablation: who may take a run, and when it has failed."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vit_lightning.ablation import claims, records
from vit_lightning.ablation import ledger as ledgers
from vit_lightning.ablation.attempts import Attempt, Attempts
from vit_lightning.ablation.ledger import Ledger, Planned
from vit_lightning.ablation.workers import devices_of
from vit_lightning.storage.metrics import write_results
from vit_lightning.training.endings import stacks_of

FACTS = {
    **{"name": "p", "question": "", "file": "plan.yaml", "config": "c.yaml", "metric": "val/loss", "mode": "min"},
    **{"baseline": "a", "arms": {"a": {}, "b": {}}, "seeds": [*range(10)], "split_varies": False, "factors": {}},
    **{"tune": None, "configs": {}, "threads": 1},
    "compare": {"metric": "test/acc", "smallest_effect": 0.1, "max_seeds": 10},
}


def make_ledger(folder: Path, lease: float = 0.3, **facts: Any) -> tuple[Ledger, Planned]:
    return Ledger(folder, {**FACTS, **facts}, claims.Leases(lease)), Planned("a", 0)


def finish(ledger: Ledger, run: Planned, **results: float) -> None:
    """Writes the results of a run, as its process would."""
    ledger.run_folder(run).mkdir(parents=True, exist_ok=True)
    write_results(ledger.run_folder(run), results)


@pytest.mark.parametrize(("more", "kind"), [("", "no result"), (" and more", "hang")])
def test_stacks_of_an_earlier_attempt_are_no_hang_of_this_one(tmp_path, more, kind):
    ledger, run = make_ledger(tmp_path)
    stacks = stacks_of(ledger.run_folder(run))
    stacks.parent.mkdir(parents=True)
    stacks.write_text("Timeout")
    ended = SimpleNamespace(exitcode=1)
    attempt = Attempt(run, claims.Claim(tmp_path / "0002.claim", 2), ended, 0, 0.0, 0.0, stacks=len("Timeout"))
    stacks.write_text(f"Timeout{more}")
    assert Attempts(ledger, None, None, 60.0)._cause(attempt)[0] == kind


def test_one_of_many_gets_a_claim(tmp_path):
    ledger, run = make_ledger(tmp_path)
    claims = [ledger.claim(run) for _ in range(5)]
    assert [claim is not None for claim in claims] == [True, False, False, False, False]
    assert claims[0].is_mine()


def test_a_claim_of_another_machine_is_taken_over_when_its_lease_has_expired(tmp_path):
    ledger, run = make_ledger(tmp_path)
    path = ledger.claims_folder(run) / "0001.claim"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"machine": "other", "processes": "x", "pid": 1, "started": "1", "progress": 0}))
    os.utime(path, (1e9, 1e9))  # its clock is years behind: that says nothing
    zombie = claims.Claim(path, 1)
    assert ledger.claim(run) is None
    time.sleep(0.2)
    assert zombie.is_mine(), "a sign of life"
    assert ledger.claim(run) is None
    time.sleep(0.2)
    assert ledger.claim(run) is None, "the lease began anew"
    time.sleep(0.4)
    claim = ledger.claim(run)
    assert claim is not None
    assert claim.number == 2
    assert not zombie.is_mine(), "who comes back finds that the run is no longer its own"
    assert ledger.claim(run) is None


def test_a_claim_of_a_dead_process_of_this_machine_is_taken_over_at_once(tmp_path):
    ledger, run = make_ledger(tmp_path, lease=1000.0)
    path = ledger.claims_folder(run) / "0001.claim"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**claims.owner(), "started": "12", "progress": 0}))  # its number is another's by now
    assert ledger.claim(run) is not None


def test_a_failure_that_is_written_while_a_claim_is_made_counts(tmp_path):
    ledger, run = make_ledger(tmp_path)
    claim = ledger.claim(run)

    class Watch:
        def has_expired(self, path):
            claim.end("failed", kind="error", cause="x")
            return True

    assert Ledger(tmp_path, ledger.facts, Watch()).claim(run) is None


def test_ways_to_fail_that_take_turns_are_counted_each(tmp_path):
    ledger, run = make_ledger(tmp_path)
    outcomes = []
    for kind in ("error", "no result", "error"):
        claim = ledger.claim(run)
        outcomes.append(ledger.end_attempt(run, claim, kind, "x"))
    assert outcomes == [False, False, True]
    assert ledger.has_finished(run)


def test_a_run_that_is_tried_again_is_tried_by_one(tmp_path):
    ledgers_of_two = [make_ledger(tmp_path)[0] for _ in range(2)]
    one, other = ledgers_of_two
    run = make_ledger(tmp_path)[1]
    one.end_attempt(run, one.claim(run), "configuration", "x")
    assert one.claim(run) is None
    assert all(run not in ledger.look().pending for ledger in ledgers_of_two)
    for ledger in ledgers_of_two:
        ledger.retry()
    assert all(run in ledger.look().pending for ledger in ledgers_of_two)
    claim = one.claim(run)
    assert other.claim(run) is None
    assert not other.has_finished(run), "it is missing again"
    one.end_attempt(run, claim, "configuration", "x")
    assert one.has_finished(run)
    assert other.has_finished(run), "what failed again stays failed"
    assert other.claim(run) is None


def test_processes_agree_on_a_run_that_one_of_them_tries_again(tmp_path):
    one, failed = make_ledger(tmp_path)
    for run in one.look().pending[1:-1]:
        finish(one, run, **{"test/acc": 0.5})
    one.end_attempt(failed, one.claim(failed), "configuration", "x")
    assert failed not in one.look().pending, "it has seen the failure"
    other = Ledger(tmp_path, one.facts)
    other.retry()
    finish(other, Planned("b", 5), **{"test/acc": 0.5})
    assert one.look().pending == other.look().pending == Ledger(tmp_path, one.facts).look().pending == [failed]
    finish(other, failed, **{"test/acc": 0.5})
    [[mine], [theirs]] = [ledger.study().done[:1] for ledger in (one, other)]
    assert (mine.seed, mine.results) == (theirs.seed, theirs.results) == (0, {"test/acc": 0.5})


def test_no_run_is_tried_again_that_would_end_alike_or_that_a_comparison_has_replaced(tmp_path):
    ledger, run = make_ledger(tmp_path)
    ledger.look()
    hung = Planned("b", 1)
    ledger.end_attempt(run, ledger.claim(run), "diverged", "training diverged in step 7")
    why = "diverged, and would do so again: not tried again (training diverged in step 7)"
    said = [f"1 run of 'a' {why}"]
    ledger.claim(hung).end("failed", kind="hang", cause="x")
    assert ledger.retry() == said
    assert run not in ledger.look().pending
    assert hung in ledger.look().pending
    ledger.claim(hung).end("failed", kind="hang", cause="x")
    ledger = Ledger(tmp_path, ledger.facts)
    while len(pending := ledger.look().pending) > 4:
        for other in pending:
            finish(ledger, other, **{"test/acc": 0.5})
    assert {other.seed for other in pending} == {8, 9}, "six pairs have been compared"
    assert ledger.retry() == [*said, "b-seed1 is not tried again: a comparison was made with another seed in its place"]
    assert ledger.look().pending == pending


def test_runs_continue_from_analysis_to_analysis_for_the_arms_that_are_open(tmp_path):
    ledger, _ = make_ledger(tmp_path, arms={"a": {}, "b": {}, "c": {}})
    assert ledger.look().planned == [Planned(arm, seed) for seed in range(6) for arm in "abc"]
    scores = {"a": 0.5, "b": 0.9, "c": 0.5}
    for run in ledger.look().planned[:-1]:
        finish(ledger, run, **{"test/acc": scores[run.arm] + 0.01 * (run.seed % 3) * (run.arm == "b")})
    assert ledger.look().pending == [Planned("c", 5)], "nothing beyond the next analysis"
    finish(ledger, Planned("c", 5), **{"test/acc": 0.7})
    assert ledger.look().pending == [Planned(arm, seed) for seed in (6, 7) for arm in "ac"], "b is decided"
    assert (ledger.look().schedule.open, ledger.look().schedule.next_analysis) == (["a", "c"], 8)
    for run in ledger.look().pending[1:]:
        finish(ledger, run, **{"test/acc": 0.5})
    ledger.end_attempt(Planned("a", 6), ledger.claim(Planned("a", 6)), "diverged", "x")
    assert ledger.look().pending == [Planned("a", 8), Planned("c", 8)], "the next seed replaces that of a failed run"
    study = Ledger(tmp_path, ledger.facts).study()
    assert [sum(run.arm == arm for run in study.runs) for arm in "abc"] == [9, 6, 9]
    assert [run.state for run in study.runs].count("failed") == 1


def test_each_arm_is_tuned_before_its_runs(tmp_path):
    tune = {"options": {"optimizer.lr": [0.1, 0.2, 0.4]}, "seeds": [1000, 1001]}
    ledger, _ = make_ledger(tmp_path, tune=tune)
    trials = ledger.look().planned
    assert len(trials) == len({ledger.run_folder(run) for run in trials}) == 12
    assert ledger.run_folder(trials[0]) == tmp_path / "tuning/a-lr-0.1-seed1000"
    losses = {"a": {"lr=0.1": 3.0, "lr=0.2": 2.0, "lr=0.4": 2.0}, "b": {"lr=0.1": 3.0, "lr=0.2": 9.0, "lr=0.4": 1.0}}
    for run in trials[1:]:
        if run == Planned("b", 1001, "lr=0.4"):  # the best value of this arm, but not always
            ledger.end_attempt(run, ledger.claim(run), "diverged", "x")
        else:
            finish(ledger, run, **{"val/loss": losses[run.arm][run.trial]})
    begun = [Planned("b", seed) for seed in range(6)]
    assert ledger.look().pending == [trials[0], *begun], "an arm that is tuned begins"
    finish(ledger, trials[0], **{"val/loss": 3.0})
    [chosen, *_] = ledger.look().chosen
    assert chosen == {"a": {"optimizer.lr": 0.2}, "b": {"optimizer.lr": 0.1}}, "of equal ones the first"
    ledger.retry()
    assert Planned("b", 1001, "lr=0.4") not in ledger.look().pending, "what was chosen stays"
    study = ledger.study()
    assert study.tuning.chosen == chosen
    assert [(trial.arm, trial.state) for trial in study.tuning.trials].count(("b", "failed")) == 1
    assert study.missing == 12


def test_an_arm_without_a_value_that_trains_has_failed_and_is_tuned_again_on_request(tmp_path):
    ledger, _ = make_ledger(tmp_path, tune={"options": {"optimizer.lr": [0.1, 0.2]}, "seeds": [1000]})
    for run in ledger.look().planned:
        if run.arm == "a":
            finish(ledger, run, **{"val/loss": 1.0})
        else:
            ledger.end_attempt(run, ledger.claim(run), "configuration", "x")
    assert {run.arm for run in ledger.look().pending} == {"a"}
    cause = "tuning: a trial of each value failed, such as tuning/b-lr-0.1-seed1000: x"
    assert {(run.arm, run.state, run.cause) for run in ledger.study().runs} == {
        ("a", "missing", None),
        ("b", "failed", cause),
    }
    ledger.retry()
    trials = [Planned("b", 1000, f"lr={value}") for value in (0.1, 0.2)]
    assert [run for run in ledger.look().pending if run.arm == "b"] == trials


def test_runs_of_an_arm_have_the_values_that_the_first_process_chose(tmp_path):
    """One process tries a failed trial again while another has begun the runs without it."""
    one, _ = make_ledger(tmp_path, tune={"options": {"optimizer.lr": [0.1, 0.2]}, "seeds": [1000]})
    worse, better = (Planned("b", 1000, f"lr={value}") for value in (0.1, 0.2))
    one.look()
    one.end_attempt(better, one.claim(better), "configuration", "x")
    other = Ledger(tmp_path, one.facts)
    one.retry()
    claim = one.claim(better)
    finish(one, worse, **{"val/loss": 2.0})
    assert (one.look().chosen[0], other.look().chosen[0]) == ({}, {}), "the trial is under way again"
    claim.end("failed", kind="configuration", cause="x")
    assert other.choose(Planned("b", 0)) == {"optimizer.lr": 0.1}
    finish(one, better, **{"val/loss": 1.0})
    assert (
        one.choose(Planned("b", 0))
        == one.look().chosen[0]["b"]
        == Ledger(tmp_path, one.facts).look().chosen[0]["b"]
        == {"optimizer.lr": 0.1}
    )


@pytest.mark.parametrize(
    ("kind", "steps", "attempts"),
    [
        ("killed", [*range(1, 40)], 6),
        ("error", [*range(1, 40)], 2),
        ("stopped", [*range(1, 40)], 39),  # a cluster may end it as often as it likes while it gets on
        ("stopped", [5] * 40, 7),  # the first got somewhere
        ("", [*range(1, 40)], 39),
        ("", [9 - n % 7 for n in range(40)], 11),
    ],
)
def test_attempts_are_limited_and_deaths_without_a_word_unless_a_run_gets_further_than_ever(
    tmp_path, kind, steps, attempts
):
    ledger, run = make_ledger(tmp_path)
    ledger.run_folder(run).mkdir(parents=True)
    count = 0
    for step in steps:
        if (claim := ledger.claim(run)) is None:
            break
        (ledger.run_folder(run) / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        count += 1
        if kind:
            ledger.end_attempt(run, claim, kind, "x")
        else:
            claim.path.write_text(json.dumps({**json.loads(claim.path.read_text()), "started": "12"}))
    assert count == attempts
    said = f"its process was killed {ledgers.SILENT_DEATHS} times in a row"
    assert kind or attempts == len(steps) or ledger.failure(run)["cause"].startswith(said)


def test_containers_that_share_the_names_of_host_and_process_make_a_file_once(tmp_path, monkeypatch):
    """Two processes with one part file: the second writes it before the first has linked it, and both would win."""
    path, link, won = tmp_path / "0001.claim", os.link, []

    def link_later(source, target):
        monkeypatch.setattr(os, "link", link)
        won.append(claims.create_once(path, "second"))
        link(source, target)

    monkeypatch.setattr(os, "link", link_later)
    won.append(claims.create_once(path, "first"))
    assert won == [True, False]
    assert path.read_text() == "second"


def test_a_claim_whose_file_was_made_though_the_answer_was_lost(tmp_path, monkeypatch):
    link = os.link

    def lose(source, target):
        link(source, target)
        raise FileExistsError

    ledger, run = make_ledger(tmp_path)
    monkeypatch.setattr(os, "link", lose)
    assert ledger.claim(run) is not None


def test_results_of_another_machine_may_come_later_than_its_word(tmp_path):
    ledger, run = make_ledger(tmp_path)
    claim = ledger.claim(run)
    said = json.loads(claim.path.read_text())
    claim.path.write_text(json.dumps({**said, "machine": "other"}))
    claim.end("done")
    assert ledger.claim(run) is None
    time.sleep(0.4)
    assert ledger.claim(run) is not None, "they never came"


def test_a_result_that_is_no_number_is_none(tmp_path):
    ledger, run = make_ledger(tmp_path)
    ledger.facts["compare"] = {**FACTS["compare"], "metric": "test/loss"}
    folder = ledger.run_folder(run)
    folder.mkdir(parents=True)
    write_results(folder, {"test/acc": 0.5, "test/loss": float("nan")})
    assert ledger.results(run) is None
    assert not ledger.has_finished(run)
    ledger.facts["compare"] = FACTS["compare"]
    assert ledger.has_finished(run)


def test_changes_are_found_behind_a_torn_line(tmp_path):
    records.note_change(tmp_path, "torch was 1, is 2")
    path = tmp_path / "changes.jsonl"
    path.write_text(path.read_text() + '{"time": "2026-')
    records.note_change(tmp_path, "numpy was 1, is 2")
    records.note_change(tmp_path, "torch was 1, is 2")
    assert records.noted_changes(tmp_path) == ["torch was 1, is 2", "numpy was 1, is 2"]


def test_runs_are_spread_over_the_gpus_that_can_be_seen(monkeypatch):
    class Plan:
        experiments = {"a": type("", (), {"trainer": {"accelerator": "auto", "devices": "auto"}})}  # noqa: RUF012

    for visible, devices in [
        ("0, 2", ["0", "2"]),
        ("MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
        ("1,-1,0", ["1"]),
        ("-1", None),
    ]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices_of(Plan()) == devices
