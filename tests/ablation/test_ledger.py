"""The ledger of an ablation: who may take a run, and when it has failed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from vit_lightning.ablation import claims
from vit_lightning.ablation import ledger as ledgers
from vit_lightning.ablation.ledger import Ledger, Planned
from vit_lightning.storage.metrics import read_results, write_results


def make_ledger(folder: Path, lease: float = 0.3) -> tuple[Ledger, Planned]:
    return Ledger(folder, {"arms": {"a": {}}, "seeds": [0]}, claims.Leases(lease)), Planned("a", 0)


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


def test_a_run_that_kills_its_process_again_and_again_fails(tmp_path):
    ledger, run = make_ledger(tmp_path)
    for number in range(ledgers.SILENT_DEATHS):
        claim = ledger.claim(run)
        assert claim is not None, number
        owner = json.loads(claim.path.read_text())
        claim.path.write_text(json.dumps({**owner, "started": "12"}))
    assert ledger.claim(run) is None
    assert ledger.failure(run)["cause"].startswith("its process was killed 10 times in a row")


def test_damaged_results_are_no_results(tmp_path):
    ledger, run = make_ledger(tmp_path)
    folder = ledger.run_folder(run)
    folder.mkdir(parents=True)
    write_results(folder, {"test/acc": 0.5, "steps": 3})
    assert read_results(folder) == {"test/acc": 0.5, "steps": 3}
    text = (folder / "results.json").read_text()
    for damaged in (text.replace("0.5", "0.6"), text[:-9], "", "[]", "{}"):
        (folder / "results.json").write_text(damaged)
        assert read_results(folder) is None
        assert ledger.results(run) is None


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
    one.end_attempt(run, one.claim(run), "diverged", "x")
    assert one.claim(run) is None
    for ledger in ledgers_of_two:
        ledger.retry([run])
        assert not ledger.has_finished(run)
    claim = one.claim(run)
    assert other.claim(run) is None
    assert not other.has_finished(run), "it is missing again"
    one.end_attempt(run, claim, "diverged", "x")
    assert one.has_finished(run)
    assert other.has_finished(run), "what failed again stays failed"
    assert other.claim(run) is None


def test_a_retry_after_an_answer_is_noted_as_one_more_analysis(tmp_path):
    ledger, run = make_ledger(tmp_path)
    ledger.facts["seeds"] = [0, 1]
    ledger.end_attempt(run, ledger.claim(run), "diverged", "x")
    ledger.retry([run])
    assert ledgers._noted_changes(tmp_path) == [], "there was no answer yet"
    folder = ledger.run_folder(Planned("a", 1))
    folder.mkdir(parents=True)
    write_results(folder, {"test/acc": 0.5})
    ledger.retried = {}
    ledger.retry([Planned("a", 1)])
    assert ledgers._noted_changes(tmp_path) == [], "none of these failed"
    for _ in range(2):
        ledger.retry([run])
        ledger.end_attempt(run, ledger.claim(run), "diverged", "x")
    said = "failed runs were tried again after analysis 1, which makes one more analysis: a-seed0"
    assert ledgers._noted_changes(tmp_path) == [f"{said} (0001)", f"{said} (0002)"]


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
    ledger.facts["report"] = "test/loss"
    folder = ledger.run_folder(run)
    folder.mkdir(parents=True)
    write_results(folder, {"test/acc": 0.5, "test/loss": float("nan")})
    assert ledger.results(run) is None
    assert not ledger.has_finished(run)
    ledger.facts["report"] = "test/acc"
    assert ledger.has_finished(run)


def test_changes_are_found_behind_a_torn_line(tmp_path):
    ledgers._note_change(tmp_path, "torch was 1, is 2")
    path = tmp_path / "changes.jsonl"
    path.write_text(path.read_text() + '{"time": "2026-')
    ledgers._note_change(tmp_path, "numpy was 1, is 2")
    ledgers._note_change(tmp_path, "torch was 1, is 2")
    assert ledgers._noted_changes(tmp_path) == ["torch was 1, is 2", "numpy was 1, is 2"]
