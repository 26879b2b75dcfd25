"""Attacks on an ablation's answer: each is refused, changes nothing, or is named."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from vit_lightning.ablation.ledger import Ledger, Planned, open_ledger, read_study
from vit_lightning.ablation.plan import read_plan
from vit_lightning.cli import main
from vit_lightning.errors import UserError
from vit_lightning.report.analysis import analyse
from vit_lightning.report.checks import run_checks
from vit_lightning.report.comparisons import compare, compare_all
from vit_lightning.report.report import make_report
from vit_lightning.report.study import Study
from vit_lightning.report.tables import tuning_table
from vit_lightning.report.wording import at_the_end, why_ended
from vit_lightning.storage.metrics import write_results

PLAN: dict[str, Any] = {
    "question": "Class token or mean?",
    "config": "config.yaml",
    "arms": {"cls": {"model.pool": "cls"}, "mean": {"model.pool": "mean"}},
    "baseline": "cls",
    "compare": {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 8},
}
Result = Callable[[Planned], float]


def begin(name: str = "out", **options: Any) -> Ledger:
    """Opens the ledger of the plan with other options."""
    Path("config.yaml").write_text(
        "model: {patch_size: 4, emb_size: 16, depth: 1, num_heads: 2}\ntrainer: {accelerator: cpu}\n"
    )
    Path("plan.yaml").write_text(yaml.safe_dump({**copy.deepcopy(PLAN), **options}, sort_keys=False))
    return open_ledger(Path("runs", name), read_plan(Path("plan.yaml")), threads=1)[0]


def alike(run: Planned) -> float:
    """Returns results in which the arms hardly differ."""
    return 0.9 + 0.01 * (run.seed % 3) + 0.001 * (run.seed * 7 % 5) * (run.arm == "mean")


def finish(ledger: Ledger, run: Planned, result: float) -> None:
    """Writes the results of a run, as its process would."""
    ledger.run_folder(run).mkdir(parents=True, exist_ok=True)
    write_results(ledger.run_folder(run), {ledger.measured(run): result, "test_images": 1000})


def carry_out(ledger: Ledger, result: Result = alike) -> Study:
    """Ends all runs that are needed; returns the study as its report reads it."""
    while pending := ledger.look().pending:
        for run in pending:
            finish(ledger, run, result(run))
    return read_study(ledger.folder)


def verdicts(study: Study) -> list[tuple[str, int, str]]:
    return [(one.arm, one.n, one.verdict) for one in compare(study)]


MEAN = Planned("mean", 1)
RESULTS = Path("runs/out/runs/mean-seed1/results.json")
HARM: dict[str, Callable[[Ledger], object]] = {
    "is gone": lambda ledger: shutil.rmtree(RESULTS.parent),
    "ended at 99.00 % when run again": lambda ledger: finish(ledger, MEAN, 0.99),
    "was edited, or is damaged": lambda ledger: RESULTS.write_text(RESULTS.read_text().replace("0.912", "0.999")),
}


@pytest.mark.parametrize("said", HARM)
def test_the_first_result_counts_whatever_becomes_of_its_file(in_folder, said):
    ledger = begin()
    before = verdicts(carry_out(ledger))
    HARM[said](ledger)
    ledger = begin()
    assert ledger.look().pending == []
    study = carry_out(ledger)
    assert verdicts(study) == before
    assert study.plan_changed == [f"'mean' with seed 1 {said}; its first result, 91.20 %, counts"]


def test_a_result_is_kept_before_its_attempt_ends(in_folder):
    ledger, run = begin(), MEAN
    claim = ledger.claim(run)
    assert not ledger.end_done(run, claim)
    finish(ledger, run, 0.9)
    assert ledger.end_done(run, claim)
    shutil.rmtree("runs/out/runs/mean-seed1")  # before any process has seen it
    ledger = begin()
    assert ledger.claim(run) is None
    assert run not in ledger.look().pending
    said = "'mean' with seed 1 is gone; its first result, 90.00 %, counts"
    assert carry_out(ledger).plan_changed == [said]


def test_an_attempt_that_was_done_and_whose_result_is_lost_is_named(in_folder):
    ledger, run = begin(), MEAN
    ledger.claim(run).end("done")
    said = ["mean-seed1 was done in attempt 1, whose result is lost"]
    assert read_study(ledger.folder).plan_changed == said
    claim = ledger.claim(run)
    finish(ledger, run, 0.95)
    ledger.end_done(run, claim)
    assert carry_out(ledger).plan_changed == said, "also after it was trained again"


def predict(ledger: Ledger, run: Planned, right: np.ndarray) -> float:
    """Writes predictions of a run; returns their accuracy."""
    ledger.run_folder(run).mkdir(parents=True, exist_ok=True)
    label = np.arange(1000) % 10
    kept = {"index": np.arange(1000), "label": label, "prediction": np.where(right, label, (label + 1) % 10)}
    np.savez(ledger.run_folder(run) / "test_predictions.npz", **kept)
    return float(right.mean())


def test_predictions_of_a_second_result_do_not_speak_about_new_images(in_folder):
    draw, ledger = np.random.default_rng(0), begin()
    before = analyse(carry_out(ledger, lambda run: predict(ledger, run, draw.random(1000) < 0.8)))
    predict(ledger, MEAN, np.ones(1000, dtype=bool))
    after = analyse(read_study(ledger.folder))
    assert before.tested.correct.keys() - after.tested.correct.keys() == {("mean", 1)}
    assert not np.isnan(after.for_new_images(after.comparisons[0])).any()


def test_a_claim_is_kept_when_all_that_speaks_for_it_is_deleted(in_folder):
    carry_out(begin())
    for folder in ("runs", "ledger"):
        for path in Path("runs/out", folder).glob("mean-seed*"):
            shutil.rmtree(path)
    study = carry_out(begin(), lambda run: alike(run) + 0.05 * (run.arm == "mean"))
    assert verdicts(study) == [("mean", 6, "better")]
    said = "after 6 pairs 'mean' was claimed to be not better, not worse against 'cls', which stands"
    assert study.plan_changed == [f"{said}; by the results as they are now: better, not worse"]


def test_another_question_after_the_result_is_named(in_folder):
    begin(question="Mean or clas token?")
    assert carry_out(begin()).plan_changed == [], "before the first run it is no change"
    asked = "Is the mean as good?"
    study = carry_out(begin(question=asked))
    assert (study.question, study.plan_changed) == (asked, [f'question was "{PLAN["question"]}", is "{asked}"'])


def test_an_option_newer_than_an_ablation_is_no_change_of_its_plan_at_its_default(in_folder):
    carry_out(begin())
    path = Path("runs/out/ledger.json")
    facts = json.loads(path.read_text())
    for config in facts["configs"].values():
        del config["model"]["init_args"]["float32_residual"], config["watchdog_minutes"]
    path.write_text(json.dumps(facts))
    begin()
    with pytest.raises(UserError, match=r"arm cls: model.float32_residual was False, is True"):
        begin(fixed={"model.float32_residual": True})
    for config in facts["configs"].values():
        config["model"]["init_args"]["no_such_option"] = 1
    path.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"arm mean: model.no_such_option was 1, is None"):
        begin()


def test_a_ledger_of_an_earlier_version_is_called_so(in_folder, capsys):
    carry_out(begin())
    path = Path("runs/out/ledger.json")
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "compare": {**facts["compare"], "spending": "early", "moderated": True}}))
    said = "runs/out is the ledger of an earlier version: its compare options moderated, spending are gone"
    with pytest.raises(UserError, match=said):
        begin()
    assert main(["report", "runs/out"]) == 2
    assert said in capsys.readouterr().err


def test_a_further_study_of_a_question_or_an_arm_is_named_with_the_error_of_all(in_folder):
    assert carry_out(begin()).plan_changed == []
    said = "a second study of the question or of an arm (out before it): any claim of all of them is false"

    def named(name: str, **options: Any) -> list[str]:
        return read_study(begin(name, **options).folder).plan_changed

    for name, options in {
        "seeds": {"seeds": {"first": 100}},
        "irrelevant": {"question": "", "fixed": {"trainer.log_every_n_steps": 7}},
        "arm": {"question": "Another?", "arms": {"cls": {"model.pool": "cls"}, "deep": {"model.depth": 2}}},
    }.items():
        assert named(name, **options) == [f"{said} with a probability of up to 10 %"], name
    other = {"question": "What else?", "fixed": {"model.emb_size": 32}}
    assert named("other", **other) == [], "other networks, another question"
    assert carry_out(begin("seeds", seeds={"first": 100})).plan_changed != []
    shutil.rmtree("runs/seeds")
    again = begin("seeds", seeds={"first": 200})
    assert "study 3 of" in carry_out(again).plan_changed[0], "begun anew in its folder"
    shutil.rmtree("runs/seeds")
    third = named("third", compare={**PLAN["compare"], "alpha": 0.01})
    assert third == [
        "study 4 of the question or of an arm (out, seeds, seeds before it): any claim of all of them is false with a "
        "probability of up to 16 %"
    ]
    with pytest.raises(UserError, match=r"unused seeds, such as \{first: 212\}"):
        begin("out", compare={**PLAN["compare"], "smallest_effect": 0.05})


def test_the_register_may_be_another_file(in_folder):
    begin()
    plan = read_plan(Path("plan.yaml"))
    carry_out(open_ledger(Path("runs", "out"), plan, threads=1, studies=Path("all.jsonl"))[0])
    assert [path.name for path in Path().glob("**/*.jsonl")] == ["all.jsonl"], "as the ledger keeps it"
    other = open_ledger(Path("elsewhere", "other"), plan, threads=1, studies=Path("all.jsonl"))[0]
    assert len(read_study(other.folder).plan_changed) == 1
    with pytest.raises(UserError, match=r"register=/no/all.jsonl cannot be written \(give another file\)"):
        open_ledger(Path("runs", "third"), plan, threads=1, studies=Path("/no/all.jsonl"))


def test_a_copied_folder_that_goes_on_by_itself_is_named(in_folder):
    carry_out(begin())
    shutil.copytree("runs/out", "runs/copy")
    said = "a copy of out, which goes on by itself: claims of both count"
    assert carry_out(begin("copy")).plan_changed[0] == said
    shutil.move("runs/copy", "runs/moved")
    assert carry_out(begin()).plan_changed == []
    shutil.rmtree("runs/moved")
    shutil.move("runs/out", "runs/elsewhere")
    assert carry_out(begin("elsewhere")).plan_changed == [], "a folder that was moved is no copy"


def test_an_accuracy_that_is_not_that_of_its_predictions_does_not_count(in_folder):
    draw, ledger = np.random.default_rng(0), begin()

    def result(run: Planned) -> float:
        return predict(ledger, run, draw.random(1000) < 0.8) + 0.02 * (run == Planned("mean", 2))

    study = carry_out(ledger, result)
    [edited] = [run for run in study.runs if run.state == "failed"]
    assert (edited.arm, edited.seed, edited.results) == ("mean", 2, {})
    assert edited.cause.startswith("edited: test/acc ")
    assert any(text.startswith("'mean' with seed 2: test/acc ") for text in study.plan_changed)
    assert 2 not in compare(study)[0].counted, "another seed takes its place"
    assert ledger.look().pending == []


def test_one_failed_run_ends_no_arm_and_is_not_tried_until_it_ends_well(in_folder):
    ledger, failed = begin(), Planned("mean", 2)
    ledger.look()
    ledger.end_attempt(failed, ledger.claim(failed), "diverged", "training diverged in step 7")
    study = carry_out(ledger)
    assert verdicts(study) == [("mean", 6, "equivalent")]
    assert [run.seed for run in study.runs if run.arm == "mean"] == [*range(7)], "one more in its place"
    ledger.retry()
    assert ledger.look().pending == []
    finish(ledger, failed, 0.99)
    assert verdicts(read_study(ledger.folder)) == [("mean", 6, "equivalent")], "it stays a failure"


def test_going_on_after_the_end_keeps_the_earlier_maxima(in_folder):
    def begin_with(**rules: Any) -> Ledger:
        return begin(compare={**PLAN["compare"], "smallest_effect": 0.1, "alpha": 0.001, **rules})

    def noisy(run: Planned) -> float:
        return 0.5 + (-1) ** run.seed * (0.1 + 0.01 * run.seed) * (run.arm == "mean")

    study = carry_out(begin_with(max_seeds=6), noisy)
    assert verdicts(study) == [("mean", 6, "undecided")]
    assert why_ended(compare(study)) == ": max_seeds=6 is reached"
    text = at_the_end(study, compare(study))
    assert text == "nothing is left to run: max_seeds=6 is reached; compare.max_seeds may be raised"
    assert f" N{text[1:]}." in make_report(study).recommendation
    for most in (8, 12):
        ledger = begin_with(max_seeds=most)
        assert ledger.look().pending == [], "fewer than advised would not run"
        study = carry_out(ledger, noisy)
    assert (study.compare.max_seeds, study.compare.extended, study.plan_changed) == (12, (6, 8), [])
    assert len(study.seeds) == 18
    assert why_ended(compare(study)) == ": after 6 pairs an answer by 12 seeds has a chance below 20 %"
    with pytest.raises(UserError, match=r"max_seeds was 12, is 8: it can be raised alone"):
        begin_with(max_seeds=8)
    with pytest.raises(UserError, match=r"another question has its own --out and unused seeds, such as \{first: 18\}"):
        begin_with(max_seeds=12, smallest_effect=0.05)


def test_more_seeds_before_the_first_run_are_the_rule_from_the_start(in_folder):
    begin()
    rules = carry_out(begin(compare={**PLAN["compare"], "max_seeds": 40})).compare
    assert (rules.max_seeds, rules.extended) == (40, ())


TUNE = {"options": {"optimizer.lr": [0.001, 0.002]}, "seeds": [1000, 1001]}


def test_replicates_tune_anew_for_each_pair(in_folder):
    ledger = begin(tune={**TUNE, "replicates": 8})

    def result(run: Planned) -> float:
        best = "lr=0.001" if run.seed % 4 < 2 else "lr=0.002"  # by the seeds of the trials
        return alike(run) if run.trial is None else 0.3 + 0.1 * (run.trial == best)

    study = carry_out(ledger, result)
    assert ledger.retry() == ["no run has failed: there is nothing to try again"]
    n = len(study.runs) // 2
    assert {run.seed for run in study.tuning.trials} == {*range(1000, 1000 + 2 * n)}
    assert (len(study.tuning.trials), study.tuning.chosen, study.missing) == (2 * 2 * 2 * n, {}, 0)
    values = [ledger.choose(Planned("mean", seed))["optimizer.lr"] for seed in range(4)]
    assert values == [0.001, 0.002, 0.001, 0.002]
    table = tuning_table(analyse(study))
    assert f"over the seeds 1000 to {999 + 2 * n}," in table.note
    assert "every run had the same 4 trials" in table.note
    assert {row[1].partition(" ")[2] for row in table.rows} == {f"(chosen in {(n + 1) // 2} of {n} runs)"}
    with pytest.raises(UserError, match=r"tune.replicates=9 must be compare.max_seeds=8"):
        begin("other", tune={**TUNE, "replicates": 9})


def test_a_replicate_without_a_value_that_trains_is_replaced_by_the_next(in_folder):
    ledger = begin(tune={**TUNE, "seeds": [1000], "replicates": 8})
    for run in [run for run in ledger.look().planned if run.arm == "mean" and run.seed == 1002]:
        ledger.end_attempt(run, ledger.claim(run), "diverged", "training diverged in step 7")
    study = carry_out(ledger, lambda run: alike(run) if run.trial is None else 0.3)
    assert [run.state for run in study.runs if run.arm == "mean"].count("failed") == 1
    assert verdicts(study) == [("mean", 6, "equivalent")]


def test_a_run_that_is_tried_again_beside_an_analysis_is_none_that_the_analysis_chose(in_folder, monkeypatch):
    """One process marks a failed run as missing while another one, which has more results, goes on without it."""
    one, failed = begin(), Planned("mean", 2)
    one.look()
    one.end_attempt(failed, one.claim(failed), "configuration", "x")

    def result(run: Planned) -> float:  # without the failed run the arm is better, with it nobody knows
        return alike(run) + 0.02 * (run.arm == "mean")

    while len(pending := one.look().pending) > 1:
        for run in pending[:-1]:
            finish(one, run, result(run))
    finish(one, pending[0], result(pending[0]))
    other = begin()
    assert [(found.n, found.verdict) for found in other.look().schedule.comparisons] == [(6, "better")]
    with monkeypatch.context() as patch:
        patch.setattr(one, "look", lambda: one._last)  # it has not seen the last result
        assert one.retry() == []
    assert one.look().pending == other.look().pending == [failed], "both see the mark"
    finish(other, failed, 0.5)
    study = carry_out(other, result)
    assert compare(study)[0].verdict != "better"
    assert [run.state for run in study.runs if run.arm == "mean"][2] == "done"
    assert any("after 6 pairs 'mean' was claimed to be better" in text for text in study.plan_changed)


def test_a_value_that_failed_in_one_arm_alone_is_said(in_folder):
    ledger = begin(tune=TUNE)
    failed = Planned("mean", 1001, "lr=0.002")
    ledger.look()
    ledger.end_attempt(failed, ledger.claim(failed), "diverged", "training diverged in step 7")
    study = carry_out(ledger, lambda run: alike(run) if run.trial is None else 0.3)
    [said] = [check.text for check in run_checks(analyse(study)) if check.name.startswith("every arm could")]
    assert said == "optimizer.lr=0.002 failed in mean: left out there alone"


def test_claims_by_a_further_metric_stand_and_a_run_without_it_has_no_result(in_folder):
    ledger = begin(compare={**PLAN["compare"], "then": {"test/loss": 0.1}})
    first = ledger.look().pending[0]
    finish(ledger, first, 0.9)
    assert first in ledger.look().pending
    assert ledger.lacking(first, {"test/acc": 0.9}) == "test/loss is not measured"

    def end(loss: float) -> Study:
        while pending := ledger.look().pending:
            for run in pending:
                gain = 1.0 * (run.arm == "mean")
                results = {"test/acc": 0.9 + 0.05 * gain + alike(run) / 100, "test/loss": loss * gain + alike(run)}
                ledger.run_folder(run).mkdir(parents=True, exist_ok=True)
                write_results(ledger.run_folder(run), results | {"test_images": 1000})
        return read_study(ledger.folder)

    study = end(-0.5)
    found = [(one.metric, one.arm, one.n, one.verdict) for one in compare_all(study)]
    assert found == [("test/acc", "mean", 8, "better"), ("test/loss", "mean", 6, "better")]
    assert study.plan_changed == []
    [kept] = Path("runs/out/ledger/claims").glob("test-loss--mean--cls-0006.json")
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "claims": ["worse"]}))
    assert "'mean' was claimed to be worse against 'cls', which stands" in read_study(ledger.folder).plan_changed[0]
