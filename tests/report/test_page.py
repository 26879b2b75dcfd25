import csv
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import escape

import numpy as np
import pytest
import yaml
from fake_study import ARMS, bare_study, make_study

from vit_lightning.report.analysis import analyse
from vit_lightning.report.configs import config_differences, read_configs
from vit_lightning.report.figures import draw_differences
from vit_lightning.report.page import make_markdown, verdicts, write_report
from vit_lightning.report.report import Report, make_report
from vit_lightning.report.study import Run, Tuning
from vit_lightning.report.tables import Table
from vit_lightning.report.wording import caveats, headline, level_of, next_step, recommendation

FAILED = {
    ("mean", 10): "diverged: <loss> is nan at step 231",
    **{("mean without class token", seed): "hang: nothing was written for 30 minutes" for seed in range(3, 10)},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Three arms after the analysis of 6 pairs and more, with two runs that failed."""
    folder = tmp_path_factory.mktemp("study") / "pooling"
    made = make_study(folder, gains=(0.0, 0.9, 0.0), seeds=12, images=2000, failed=FAILED, random=3)
    write_report(make_report(made))
    return made


def test_a_time_is_told_with_its_pairs():
    better = [0.60, 0.61, 0.60, 0.62, 0.61, 0.60]
    made = bare_study({"cls": [0.5] * 6, "mean": better, "mean without class token": better}, images=None)
    seconds = {"cls": [10] * 6, "mean": [15, 16, 11, 70, 14, 60], "mean without class token": [9, 14, 14, 14, 60, 70]}
    runs = [replace(run, results=run.results | {"train_seconds": seconds[run.arm][run.seed]}) for run in made.runs]
    timed = analyse(replace(made, runs=runs))
    said = [next_step(timed, one) for one in timed.comparisons]
    assert said[0].endswith("; training took 1.6 times the wall-clock time (1.1 to 7 in 6 pairs)")
    assert "time" not in said[1], "once it was the faster: the machine was busy"


def checks_of(study):
    return {check.name: check for check in make_report(study).checks}


def test_the_files_say_what_the_runs_came_to(study):
    rows = list(csv.DictReader((study.folder / "results.csv").open()))
    done = {(run.arm, run.seed): run.results for run in study.runs if run.state == "done"}
    assert {(row["arm"], int(row["seed"])): float(row["test/acc"]) for row in rows} == {
        run: results["test/acc"] for run, results in done.items()
    }
    assert not {"train_seconds", "seconds", "images_per_second", "peak_memory_mb"} & {*rows[0]}
    assert rows[-1]["model.class_token"] == "false"
    found = json.loads((study.folder / "verdicts.json").read_text())
    assert [verdict["arm"] for verdict in found] == ["mean", "mean without class token"]
    keys = "arm other metric n mean low high p verdict claims decided next"
    assert [*found[0]] == keys.split()
    n = found[0]["n"]
    assert (n in (6, 8, 10), found[0]["verdict"]) == (True, "better")
    gaps = [done["mean", seed]["test/acc"] - done["cls", seed]["test/acc"] for seed in range(n)]
    assert found[0]["mean"] == pytest.approx(sum(gaps) / n)
    assert found[1]["verdict"] == "failed"


def test_the_answer_comes_first_and_names_failures_and_the_next_step(study):
    report = make_report(study)
    said = (
        "'mean' is better than 'cls', by 0.5 points or more; 'mean without class token' failed, no answer against 'cls'"
    )
    assert headline(analyse(study)) == f"{said}, of runs that finish"
    gain = verdicts(report.analysis)[0]["mean"]
    assert report.recommendation == (
        f"Take 'mean' (+{100 * gain:.2f} points of test/acc, 1 of 12 runs failed). Failed runs of 'mean without class "
        f"token' stopped a comparison: see why, then lightning ablate PLAN --out={study.folder} --retry"
    )
    assert any(
        "7 of 12 runs of 'mean without class token' failed (seed 3, 4, 5, 6, 7, 8 and 9)" in note
        for note in report.notes
    )
    page = (study.folder / "report.html").read_text()
    first = [
        "What should go to the head",
        "<b>'mean'</b> is better than <b>'cls'</b>",
        ", of runs that finish</p>",
        "Take &#39;mean&#39; (+",
        f"<code>lightning ablate PLAN --out={study.folder} --retry</code>",
        "Verdicts hold for new seeds on these 2,000 test images, and for new images where they say so. "
        "Runs were trained on 1,294 images, 30 epochs and tested on 2,000 images.",
        "settings",
        "97.5 % range (points)",
        "pairs",
        "what next",
        "also on new images",
        "7 of 12",
        "<figure>",
    ]
    places = [page.index(part) for part in first]
    assert places == sorted(places)
    assert "diverged: &lt;loss&gt; is nan at step 231" in page
    for fact in (
        "1,294 images, 30 epochs",
        "2,000 images",
        "0123456789",
        "2026-11-22",
        "experiments/digits_short.yaml",
    ):
        assert fact in page
    varying = make_markdown(make_report(replace(study, split_varies=True, plan_changed=["model.depth was 3, is 6"])))
    assert "this holds for new seeds and splits, on these 2,000 test images" in varying
    assert varying.index("Not as planned: model.depth was 3") < varying.index("| arm | verdict |")


def test_an_arm_with_failed_runs_is_not_among_those_that_may_be_taken(tmp_path):
    study = make_study(tmp_path / "study", seeds=9, images=50, failed={("mean", 3): "hang"})
    alike = [replace(run, results=run.results and {**run.results, "test/acc": 0.9}) for run in study.runs]
    report = make_report(replace(study, runs=alike))
    said = "'mean without class token' may be taken as well (open for new images); not 'mean': 1 of 9 runs failed."
    assert said in report.recommendation
    following = {row[0]: row[-1] for row in report.tables["verdicts"].rows}
    assert following["mean"].startswith("no reason to switch; 1 of 9 runs failed")
    assert following["mean without class token"].startswith("either does on these images; for new images it is open")


def test_what_is_left_to_run_is_said_with_its_cost(tmp_path):
    study = make_study(tmp_path / "study", max_seeds=20, missing=[("mean", 6), ("mean", 7), ("cls", 7)], images=60)
    report = make_report(study)
    assert report.recommendation.startswith("Not finished: 3 runs (about ")
    assert " one by one) to the next comparison. Continue with " in report.recommendation
    study = replace(study, plan_file="a plan.yaml")
    assert make_report(study).lines[-1].endswith(f"Continue with lightning ablate 'a plan.yaml' --out={study.folder}")
    text = report.tables["verdicts"].rows
    assert [row[-1].partition(" (")[0] for row in text if row[0] == "mean"] == ["3 runs"]


def test_each_arm_has_one_line_where_all_are_compared(tmp_path):
    study = make_study(tmp_path / "study", gains=(0.0, 2.0, 0.0), images=500, arms_compared="pairs")
    report = make_report(study)
    write_report(report)
    assert sorted(row[0] for row in report.tables["verdicts"].rows) == sorted(ARMS)
    assert report.headline.startswith("'mean' is ")
    assert report.tables["verdicts"].rows[0][-1] == "take it"
    assert len(json.loads((study.folder / "verdicts.json").read_text())) == 3


def test_each_verdict_says_all_that_is_claimed_and_what_it_is_worth():
    noise = np.random.default_rng(0).standard_normal((2, 30))
    base, signs = 0.9 + 0.01 * noise[0], np.tile([-1.0, 1.0], 15) + 0.1 * noise[1]

    def found(shift, sd, seeds=30):
        results = {"cls": base[:seeds], "mean": (base + shift + sd * signs)[:seeds]}
        return analyse(bare_study(results, images=None, smallest_effect=0.01, max_seeds=seeds))

    for shift, sd, label, choice in [
        (0.03, 0.003, "better than 'cls', by 1 point or more", "Take 'mean' (+3"),
        (0.01, 0.003, "better than 'cls'", "Take 'mean' if any gain will do (+1"),
        (
            0.004,
            0.001,
            "slightly better than 'cls' (by less than 1 point)",
            "Keep 'cls': no arm is better by 1 point or more; 'mean' by less: no reason to switch.",
        ),
        (
            0.0,
            0.003,
            "equivalent to 'cls' (within 1 point)",
            "Keep 'cls': no arm is better by 1 point or more; 'mean' may be taken as well.",
        ),
        (-0.004, 0.001, "slightly worse than 'cls' (by less than 1 point)", "Keep 'cls': no arm is better."),
        (-0.03, 0.003, "worse than 'cls', by 1 point or more", "Keep 'cls': no arm is better."),
    ]:
        assert headline(found(shift, sd)) == f"'mean' is {label}"
        assert choice in recommendation(found(shift, sd))
    for analysis, differs in [(found(0.01, 0.003), True), (found(0.0, 0.003), False)]:
        too_large = "by up to about 0.2 points if the true one is 1 point or more, by up to about 0.8 points"
        assert any(too_large in text for text in caveats(analysis, {})) == differs
    half = found(-0.005, 0.008, seeds=8)
    assert headline(half) == "'mean' is not better than 'cls' by 1 point or more, perhaps worse"
    assert recommendation(half).startswith("Keep 'cls': no arm is better by 1 point or more.")
    assert recommendation(half).endswith(" has a chance below 20 %."), "more seeds would find no gain"
    half = found(0.005, 0.008, seeds=8)
    assert headline(half) == "'mean' is not worse than 'cls' by 1 point or more, perhaps better"
    assert recommendation(half).startswith("Keep 'cls': no arm is shown to be better; 'mean' may be taken as well.")
    assert recommendation(half).endswith("; compare.max_seeds may be raised.")
    assert next_step(half, half.comparisons[0]) == "stop: no loss of 1 point or more"
    small = found(0.01, 0.003)
    assert "points of test/acc, perhaps under 1 point)" in recommendation(small)
    assert next_step(small, small.comparisons[0]) == "take it if any gain will do: it may be under 1 point"


def test_tuning_is_shown_with_its_budget_and_an_edge_that_was_chosen(tmp_path):
    study = make_study(tmp_path / "study", images=60)
    options = {"optimizer.lr": [0.001, 0.002, 0.004]}
    trials = [
        Run(arm, 1000, "", "done", results={"val/acc": 0.9 + lr}, tried={"optimizer.lr": lr})
        for arm in ARMS
        for lr in options["optimizer.lr"]
    ]
    tuning = Tuning("val/acc", "max", options, [1000], trials, {arm: {"optimizer.lr": 0.004} for arm in ARMS})
    report = make_report(replace(study, tuning=tuning))
    assert "over the seeds 1000, which are not" in report.tables["tuning"].note
    assert "every arm had the same 3 trials" in report.tables["tuning"].note
    assert any("smallest or largest optimizer.lr" in note for note in report.notes)
    assert report.headline.endswith(" against 'cls' with lr 0.004"), "the values that are compared"
    assert [row[0] for row in report.tables["verdicts"].rows if "cls" in row[0]] == ["cls with lr 0.004"]
    assert report.tables["tuning"].rows[0][1:] == ["90.10", "90.20", "90.40 (chosen)"]
    assert "tuning luck" not in make_markdown(report), "one seed tells nothing of its luck"


def test_the_luck_of_tuning_stands_in_the_line_of_a_verdict_that_it_may_have_made(tmp_path):
    study = make_study(tmp_path / "study", images=60, gains=(0.0, 3.0, 0.0))
    noise, options = np.random.default_rng(0).normal(0, 1, (len(ARMS), 3, 2)), {"optimizer.lr": [0.001, 0.002, 0.004]}
    chosen = {arm: {"optimizer.lr": lr} for arm, lr in zip(ARMS, (0.001, 0.004, 0.001), strict=True)}

    def report(spread: float) -> Report:
        results = 0.9 + spread * (noise + 0.5 * np.arange(3)[:, None])
        trials = [
            Run(arm, seed, "", "done", results={"val/acc": result, "test/acc": result}, tried={"optimizer.lr": lr})
            for arm, of_arm in zip(ARMS, results, strict=True)
            for lr, of_value in zip(options["optimizer.lr"], of_arm, strict=True)
            for seed, result in zip((1000, 1001), of_value, strict=True)
        ]
        return make_report(replace(study, tuning=Tuning("val/acc", "max", options, [1000, 1001], trials, chosen)))

    made = report(0.04)
    [gain] = [one.mean for one in made.analysis.comparisons if one.arm == "mean"]
    share = (made.analysis.luck >= gain).mean()
    assert 0.005 < share < (made.analysis.luck > 0).mean(), "smaller ones are more frequent"
    said = f"; tuning luck alone would do this in {100 * share:.0f} % of studies"
    shown = {row[0]: row[1] for row in made.tables["verdicts"].rows}
    assert [name for name, verdict in shown.items() if verdict.endswith(said)] == ["mean with lr 0.004"]
    assert any(said in line for line in made.sentences if line.startswith("'mean' with"))
    whole = f"called better or worse in {100 * (made.analysis.luck > 0).mean():.0f} % of studies; the 5 % leave it out"
    assert whole in made.tables["verdicts"].note
    assert "tuning luck" not in make_markdown(report(0.001)).lower(), "rates that hardly differ cannot have made it"


def test_the_page_needs_nothing_else_and_links_to_the_runs(study):
    text = (study.folder / "report.html").read_text()
    links, ids = re.findall(r'<a [^>]*href="([^"]+)"', text), re.findall(r'\bid="([^"]+)"', text)
    fetched = re.findall(r'\b(?:src|href|srcset|data)="([^"]*)"', re.sub(r"<a [^>]*>", "", text))
    assert fetched
    assert all(place.startswith(("data:,", "#")) for place in fetched)
    assert {place[1:] for place in fetched if place.startswith("#")} <= {*ids}
    assert not re.search(r"<(script|iframe|object|embed|img)\b|@import|url\((?!#)", text)
    assert len(ids) == len(set(ids)), "ids of figures collide"
    assert len(links) == 36
    assert all((study.folder / link).is_dir() for link in links)
    files = sorted((study.folder / "figures").glob("*.svg"))
    assert [file.stem for file in files] == ["differences"]
    assert all(ElementTree.parse(file).getroot().tag.endswith("svg") for file in files)


@pytest.mark.parametrize(
    ("made", "answer"),
    [
        ({"seeds": 1}, "are undecided against 'cls'"),
        ({"seeds": 2}, "are undecided against 'cls'"),
        ({"missing": [(arm, seed) for arm in ARMS for seed in range(8)]}, "are undecided against 'cls'"),
        ({"missing": [("cls", seed) for seed in range(8)]}, "are undecided against 'cls'"),
        ({"failed": {(arm, seed): "hang" for arm in ARMS for seed in range(8)}}, "failed"),
    ],
    ids=["one seed", "two seeds", "nothing yet", "no baseline", "all failed"],
)
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::UserWarning")
def test_what_cannot_be_said_is_said_in_words(tmp_path, made, answer):
    study = make_study(tmp_path / "study", images=60, **made)
    write_report(make_report(study))
    assert answer in headline(analyse(study))
    page = (study.folder / "report.html").read_text()
    assert "nan" not in re.sub("<svg.*?</svg>", "", page, flags=re.DOTALL)
    assert "NaN" not in (study.folder / "verdicts.json").read_text()


def test_runs_that_come_out_alike_raise_the_question_whether_the_arm_does_anything(tmp_path):
    study = make_study(tmp_path / "study", images=50)
    alike = [replace(run, results={**run.results, "test/acc": 0.9}) for run in study.runs]
    study = replace(study, runs=alike)
    said = "'mean' and 'mean without class token' are equivalent to 'cls' (within 0.5 points)"
    report = make_report(study)
    assert report.headline == f"{said}, on these images only", "other images were predicted right"
    assert "they compute the same, or the option that they differ in has no effect" in report.notes[0]
    assert "on these images only" in report.tables["verdicts"].rows[1]
    for path in (tmp_path / "study").glob("runs/mean-seed*/test_predictions.npz"):
        shutil.copy(str(path).replace("mean-seed", "cls-seed"), path)
    rows = {row[0]: row for row in make_report(study).tables["verdicts"].rows}
    assert "also on new images" in rows["mean"], "no image tells them apart"
    assert "on these images only" in rows["mean without class token"]
    one, other = (f"'{arm}' is equivalent to 'cls' (within 0.5 points)" for arm in ("mean", "mean without class token"))
    assert headline(analyse(study)) == f"{one}; {other}, on these images only"


def test_a_difference_that_is_the_same_in_all_pairs_has_no_range_and_no_size(tmp_path):
    """Of an image that one arm gets right with probability .95: that 8 of 8 are alike says nothing of the mean."""
    study = make_study(tmp_path / "study", images=100, smallest_effect=0.01)
    same = {"cls": 0.9, "mean": 0.91}
    runs = [replace(t, results={**t.results, "test/acc": same.get(t.arm, t.results["test/acc"])}) for t in study.runs]
    report = make_report(replace(study, runs=runs))
    said = "'mean' is better than 'cls', on these images only"
    assert said in report.headline.split("; "), "not by 1 point or more"
    [row] = [row for row in report.tables["verdicts"].rows if row[0] == "mean"]
    assert row[report.tables["verdicts"].header.index("97.5 % range (points)")] == "\N{EN DASH}"
    [said] = [note for note in report.notes if note.startswith("All 8 pairs of 'mean' and 'cls' differ by the same")]
    assert "take more test images" in said
    assert "on these images only" in row, "nothing is known of new ones"
    assert "for new images it is open" in row[-1]
    assert np.isnan([verdicts(report.analysis)[0][key] or np.nan for key in ("low", "high")]).all()


@pytest.mark.parametrize(("arms", "level"), [(2, "95 %"), (4, "98.3 %"), (106, "99.952 %")])
def test_the_level_of_a_range_is_never_100_percent(arms, level):
    assert level_of(analyse(bare_study({str(arm): [] for arm in range(arms)}, max_seeds=8))) == level


def edit(study, change, runs=None):
    """Changes the configs of runs, of all by default."""
    for run in runs or study.runs:
        path = study.folder / run.folder / "config.yaml"
        content = yaml.safe_load(path.read_text())
        change(run, content)
        path.write_text(yaml.safe_dump(content))


def test_every_option_in_which_an_arm_differs_is_on_the_first_screen(tmp_path):
    study = make_study(tmp_path / "study", gains=(0.0, 2.0, 0.0), images=500)
    longer = [run for run in study.runs if run.arm == "mean"]
    edit(study, lambda run, config: config["trainer"].update(max_epochs=60), longer)
    for run in longer:
        run.results["epochs"] = 60
    report = make_report(study)
    differs = report.tables["verdicts"].header.index("settings")
    shown = {row[0]: row[differs] for row in report.tables["verdicts"].rows}
    assert shown["cls"] == "model.pool=cls, optimizer.lr=0.002"
    assert shown["mean"] == "model.pool=mean, trainer.max_epochs=60 (not in the plan)"
    assert shown["mean without class token"] == "model.pool=mean, model.class_token=false, optimizer.lr=0.003"
    assert "it differs in model.pool=mean, trainer.max_epochs=60 (not in the plan)" in report.recommendation
    assert "Runs were trained on 1,294 images, 30 to 60 epochs" in report.caveats[0]
    assert any(line.startswith("'mean' [model.pool=mean, trainer.max_epochs=60") for line in report.sentences)


def test_the_range_for_new_images_of_a_small_test_set_is_no_wider_than_its_images_tell(tmp_path):
    """Where by chance hardly anything varies over seeds, degrees of freedom below 1 made it 25 points wide."""
    widths = []
    for random in range(6):
        study = make_study(tmp_path / str(random), seeds=12, images=91, gains=(0.0, 0.0, 0.0), random=random)
        analysis = analyse(study)
        for one in analysis.comparisons:
            low, high = analysis.for_new_images(one)
            widths.append((high - low) / (one.interval[1] - one.interval[0]))
        [axis] = draw_differences(analysis).axes
        left, right = axis.get_xlim()
        ends = [path.vertices[:, 0] for lines in axis.collections[-2:-1] for path in lines.get_paths()]
        assert all(left <= end.min() and end.max() <= right for end in ends)
    assert 1 <= min(widths) <= max(widths) < 3


@pytest.mark.filterwarnings("error::UserWarning")
def test_arms_may_have_any_names_and_there_may_be_many(tmp_path):
    names = [
        baseline := "a_$x^$ & <b>",
        "_$_",
        "[0.9, 0.999]",
        "$\\foo$",
        *(f"{'_' * (n % 2)}arm {n} " + "x" * 4 * n for n in range(10)),
    ]
    arms = {name: {"model.depth": number} for number, name in enumerate(names)}
    study = make_study(tmp_path / "study", arms=arms, gains=[0.1 * n for n in range(14)], images=100)
    write_report(make_report(study))
    drawn = (study.folder / "figures" / "differences.svg").read_text()
    assert all(f">{escape(name, quote=False)[:5]}" in drawn for name in names[1:])
    assert f"difference to '{escape(baseline, quote=False)}'" in drawn


def test_checks_hold_for_a_study_that_went_well(tmp_path):
    study = make_study(tmp_path / "study", images=60)
    assert {name: check.ok for name, check in checks_of(study).items()} == dict.fromkeys(checks_of(study), True)


def test_checks_find_what_would_spoil_a_comparison(tmp_path):
    study = make_study(tmp_path / "study", images=60)
    edit(study, lambda run, config: config["trainer"].update(max_epochs=31), study.runs[-1:])
    edit(study, lambda run, config: config["checkpoint"].update(monitor="test/acc"), study.runs[-1:])
    place = study.folder / study.runs[0].folder / "environment.json"
    place.write_text(place.read_text().replace('"threads": 1', '"threads": 2'))
    other = make_study(tmp_path / "other", images=61)
    shutil.copy(other.folder / other.runs[0].folder / "test_predictions.npz", study.folder / study.runs[1].folder)
    found = checks_of(replace(study, plan_changed=["optimizer.lr was 0.002, is 0.003"]))
    assert not any(check.ok for check in found.values())
    edit(other, lambda run, config: config.update(seed_everything=99))
    assert "another seed than the plan" in checks_of(other)["arms differ only in what the plan names"].text
    texts = "\n".join(check.text for check in found.values())
    apart = "threads, and between arms: a difference may be that of hardware or versions"
    for part in ("checkpoint.monitor, trainer.max_epochs", "test/acc selects", "was 0.002", "other test", apart):
        assert part in texts


def unplanned(study, **changed):
    made = replace(study, **changed)
    return {one.key: one.values for one in config_differences(made, read_configs(made)) if not one.planned}


def test_what_differs_unlike_the_plan_is_found_and_not_what_tuning_chose_or_splits_that_vary(tmp_path):
    study = make_study(tmp_path / "study", images=60, seeds=2)
    chosen = {arm: {"optimizer.weight_decay": 0.001 * (1 + place)} for place, arm in enumerate(ARMS)}

    def tune(run, config):
        config["optimizer"]["weight_decay"] = chosen[run.arm]["optimizer.weight_decay"]
        config["data"] = {"split_seed": run.seed}

    edit(study, tune)
    tuning = Tuning("val/acc", "max", {"optimizer.weight_decay": [0.001, 0.002, 0.003]}, [1000], [], chosen)
    planned = {"tuning": tuning, "split_varies": True}
    assert unplanned(study).keys() == {"optimizer.weight_decay", "data.split_seed"}
    assert unplanned(study, **planned) == {}
    assert checks_of(study)["arms are tested on the same images"].ok
    edit(study, lambda run, config: config["data"].update(root=run.arm))
    assert checks_of(study)["arms are tested on the same images"].ok is None, "labels alone tell that they are"
    edit(study, lambda run, config: config["data"].pop("root"))
    edit(study, lambda run, config: config["optimizer"].update(lr=0.004), study.runs[:1])
    assert unplanned(study, **planned)["optimizer.lr"]["cls"] == [0.004, 0.002], "not the same in all runs of an arm"
    named = [run for run in study.runs if run.arm == "mean"]  # by another arm alone
    edit(study, lambda run, config: config["model"]["init_args"].update(class_token=False), named)
    assert unplanned(study, **planned).keys() == {"optimizer.lr", "model.class_token"}


def test_a_damaged_file_of_a_run_leaves_its_part_out(tmp_path):
    study = make_study(tmp_path / "study", images=60)
    (study.folder / study.runs[0].folder / "test_predictions.npz").write_bytes(b"PK no zip")
    (study.folder / study.runs[1].folder / "config.yaml").write_text("a: [")
    assert "cannot be read" in make_markdown(make_report(study))


def test_tables_escape_what_their_language_would_read():
    table = Table("a & b", ["arm", "x_1"], [["<b> | 5 %", "\N{MINUS SIGN}1"]])
    assert "\\<b> \\| 5 %" in table.to_markdown()
    assert "x\\_1" in table.to_markdown()
