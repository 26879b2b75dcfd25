"""Rows 21 and 22 of the fault plan: an ablation that is killed, shared, and whose runs fail."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import yaml
from fake_runs import pretend
from runs import example

from vit_lightning.ablation import ledger as ledgers
from vit_lightning.ablation import timing
from vit_lightning.ablation.ablate import AblateConfig, SomeFailed, ablate
from vit_lightning.ablation.ledger import Planned, read_study
from vit_lightning.ablation.plan import read_plan
from vit_lightning.errors import UserError
from vit_lightning.report.report import make_report
from vit_lightning.report.study import Study
from vit_lightning.storage.metrics import read_metrics

MICRO = {
    **{"model.patch_size": 4, "model.emb_size": 16, "model.depth": 1, "model.num_heads": 2, "model.emb_dropout": 0.1},
    **{"data.batch_size": 162, "trainer.max_epochs": 1, "trainer.accelerator": "cpu", "trainer.log_every_n_steps": 1},
    **{"checkpoint.every_n_steps": 2, "pictures_every_n_epochs": 0},
}
"""Eight steps."""
TUNE = {"options": {"optimizer.lr": [0.001, 0.002]}, "seeds": [1000]}


def breaking(how: str) -> list[dict[str, object]]:
    return [{"class_path": "ablation_arms.Breaks", "init_args": {"how": how}}]


def write_plan(
    folder: Path, arms: dict[str, dict[str, object]], max_seeds: int = 6, tune: object = None, **compare: object
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "short.yaml").write_text("seed_everything: 0\n")
    plan = {"name": "p", "config": "short.yaml", "fixed": {**MICRO, **compare.pop("fixed", {})}, "arms": arms}
    rules = {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": max_seeds, **compare}
    plan |= {"baseline": next(iter(arms)), "compare": rules, **({} if tune is None else {"tune": tune})}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))


def command(out: str, *flags: str, workers: int = 2) -> tuple[str, ...]:
    return ("ablate", "plan.yaml", f"--out={out}", f"--workers={workers}", *flags)


def complete(folder: Path, out: str, workers: int = 2) -> None:
    """The command, to its end."""
    process = harness.start(folder, *command(out, workers=workers))
    process.join(1200)
    assert process.exitcode == 0, harness.log(folder)[-3000:]


def determined(folder: Path) -> dict[tuple[str, int], dict[str, object]]:
    """What training determines of each run."""
    costs = ("second", "memory")
    return {
        (run.arm, run.seed): {k: v for k, v in run.results.items() if not any(cost in k for cost in costs)}
        for run in read_study(folder).runs
    }


def tuned(study: Study) -> object:
    """What the tuning chose, and by which numbers."""
    if (tuning := study.tuning) is None:
        return None
    return tuning.chosen, [(run.arm, run.seed, run.tried, run.results.get(tuning.metric)) for run in tuning.trials]


def assert_same(folder: Path, reference: Path) -> None:
    """All is done, no run twice, and nothing that training determines differs by a bit; nor do tuning and verdicts."""
    study = read_study(folder)
    assert [run.state for run in study.runs] == ["done"] * len(study.runs)
    assert determined(folder) == determined(reference)
    assert tuned(study) == tuned(read_study(reference))
    for name in ("results.csv", "verdicts.json"):
        assert (folder / name).read_bytes() == (reference / name).read_bytes()
    assert {path.name for path in (folder / "runs").iterdir()} == {Path(run.folder).name for run in study.runs}
    for place in {path.parent for path in (folder / "ledger").rglob("*.end")}:
        ends = [json.loads(path.read_text())["outcome"] for path in place.glob("*.end")]
        assert ends.count("done") <= 1, f"{place.name} was run twice"


def rows(out: Path) -> int:
    """Lines that all runs have logged."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/*/metrics.jsonl"))


def punish(folder: Path, out: str, *, seed: int, kills: int) -> dict[str, int]:
    """Kills the runner, one of its runs, or all at once, at random moments; starts the runner again where it is gone.

    The moments are counted in rows that the runs log, 0 to 12 since the last kill, so that a slow machine is no worse.

    Returns how many of each were killed while they lived; then lets it end.
    """
    draw, count = random.Random(seed), {"runner": 0, "run": 0, "all": 0, "SIGTERM to a run": 0}
    process = harness.start(folder, *command(out))
    while sum(count.values()) < kills:
        until = rows(folder / out) + draw.randint(0, 12)
        while process.exitcode is None and (not harness.children(process.pid or 0) or rows(folder / out) < until):
            time.sleep(0.02)  # without runs it still reads the plan: a kill would hit nothing
        time.sleep(draw.uniform(0.0, 0.1))
        kind, runs = draw.choice(list(count)), harness.children(process.pid or 0)
        if process.exitcode is not None:
            if process.exitcode == 0:
                break
            process = harness.start(folder, *command(out))
            continue
        if not runs:  # between two runs
            continue
        if kind == "runner":
            process.kill()
        elif kind == "all":
            os.kill(process.pid or 0, signal.SIGSTOP)
            for pid in [*runs, process.pid or 0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(runs), signal.SIGKILL if kind == "run" else signal.SIGTERM)
        count[kind] += 1
        if kind in ("runner", "all"):
            process.join()
            process = harness.start(folder, *command(out))
    process.join(1200)
    if process.exitcode != 0:
        complete(folder, out)
    return count


ARMS = {
    "cls": {"model.pool": "cls", "trainer.callbacks": breaking("slow")},
    "mean": {"model.pool": "mean", "trainer.callbacks": breaking("slow")},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ablation that nobody disturbed: tuned, and analysed twice."""
    folder = tmp_path_factory.mktemp("ablation")
    write_plan(folder, ARMS, 6, TUNE, alpha=0.005)
    complete(folder, "whole", workers=1)
    study = read_study(folder / "whole")
    assert [len(study.runs), len(study.tuning.trials)] == [12, 4]
    return folder


def test_kills_change_nothing_nor_does_a_second_process_that_shares_the_ledger(reference):
    second = harness.start(reference, *command("killed"))
    counted = punish(reference, "killed", seed=1, kills=5)
    assert sum(counted.values()) >= 4, counted
    second.join(1200)
    assert second.exitcode == 0, harness.log(reference)[-3000:]
    assert_same(reference / "killed", reference / "whole")
    owners = {json.loads(path.read_text())["pid"] for path in (reference / "killed").rglob("*.claim")}
    assert second.pid in owners, "both worked"
    assert len(owners) >= 2


@pytest.mark.full
def test_fifty_kills_over_an_ablation_with_tuning_and_three_analyses(tmp_path):
    arms = {**ARMS, "drop path": {"model.drop_path": 0.1, "trainer.callbacks": breaking("slow")}}
    write_plan(tmp_path, arms, 10, TUNE, fixed={"trainer.max_epochs": 3}, alpha=0.005)
    complete(tmp_path, "whole")
    counted = punish(tmp_path, "killed", seed=2, kills=50)
    print(counted)
    assert sum(counted.values()) == 50, counted
    assert min(counted.values()) >= 5, counted
    assert_same(tmp_path / "killed", tmp_path / "whole")


@pytest.fixture
def in_arms(tmp_path, monkeypatch):
    """A folder whose configs may name the callbacks beside this file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sys.modules.pop("ablation_arms", None)
    return tmp_path


def test_runs_that_fail_for_good(in_arms, monkeypatch, capsys):
    """One arm, each of whose seeds fails in another way."""
    causes = {
        "memory": ("out of memory", "can't allocate memory"),
        "nan": ("diverged", "training diverged in step"),
        "config": ("configuration", "model.depth=9 is more than there is"),
        "hang": ("hang", "nothing was written for 0.1 minutes"),
        "leaves": ("no result", "the process returned 0 and left no results.json"),
        "status": ("no result", "the process returned 255 and left no results.json"),
    }
    write_plan(in_arms, {"good": {}, "bad": {"trainer.callbacks": breaking(",".join(causes))}})
    pretend("plan.yaml", "out", *(f"bad-seed{seed}" for seed in range(6)))
    monkeypatch.setitem(ledgers.ATTEMPTS, "hang", 1)
    config = AblateConfig(Path("plan.yaml"), out=Path("out"), workers=2, patience=0.1)
    with pytest.raises(SomeFailed) as caught:
        ablate(config)
    assert caught.value.exit_code == 5
    runs = [run for run in read_study(Path("out")).runs if run.arm == "bad"]
    assert len(runs) == 6, "no more are begun where four of the nine that may replace each other have failed"
    for run, (kind, text) in zip(runs, causes.values(), strict=True):
        assert run.state == "failed"
        assert run.cause is not None
        assert run.cause.startswith(f"{kind}: ")
        assert text in run.cause
        attempts = len(list(Path(f"out/ledger/bad-seed{run.seed}").glob("*.claim")))
        assert attempts == {"out of memory": 2, "no result": 2}.get(kind, 1)
    before = {path: path.stat().st_mtime_ns for path in Path("out/ledger").rglob("*")}
    with pytest.raises(SomeFailed):
        ablate(config)
    assert before == {path: path.stat().st_mtime_ns for path in Path("out/ledger").rglob("*")}, "not tried again"


@pytest.mark.full
def test_a_run_that_its_watchdog_ends_is_tried_again(in_arms):
    ways = ",".join(["fine"] * 3 + ["hang"] + ["fine"] * 5)  # of seed 3 alone
    write_plan(in_arms, {"good": {}, "bad": {"trainer.callbacks": breaking(ways)}}, fixed={"watchdog_minutes": 4 / 60})
    run = Planned("bad", 3)
    folder = pretend("plan.yaml", "out", run.name).run_folder(run)
    with contextlib.suppress(SomeFailed):
        ablate(AblateConfig(Path("plan.yaml"), out=Path("out")))
    (failed,) = [one for one in read_study(Path("out")).runs if one.state == "failed"]
    assert (failed.arm, failed.seed) == ("bad", 3)
    assert failed.cause == "hang: its watchdog has ended it (hang-rank0.txt in its folder has the stacks)"
    assert len(list(Path("out/ledger/bad-seed3").glob("*.claim"))) == ledgers.ATTEMPTS["hang"] == 2
    stacks = (folder / "hang-rank0.txt").read_text()
    assert stacks.count("Timeout (") == 2
    assert "ablation_arms.py" in stacks


@pytest.mark.full
def test_parts_beside_the_plan_are_arms(tmp_path):
    own = {"attention": {"model.attention": "beside_the_plan.Twice"}, "loss": {"loss": "parts.focal"}}
    write_plan(tmp_path, {"ours": {}, **own, "pool": {"model.pool": "parts.Top"}})
    (tmp_path / "parts.py").write_text(example("all parts"))
    (tmp_path / "beside_the_plan.py").write_text("from parts import Mixer\n\n\nclass Twice(Mixer):\n    pass\n")
    process = harness.start(tmp_path, "plan.yaml", "out", *(f"{arm}-seed0" for arm in (*own, "pool")), call=pretend)
    process.join(300)
    assert process.exitcode == 0, harness.log(tmp_path)[-3000:]
    complete(tmp_path, "out")
    assert [run.state for run in read_study(tmp_path / "out").runs] == ["done"] * 6 * 4
    assert len([*(tmp_path / "out/runs").rglob("parts.py")]) == 3
    (tmp_path / "parts.py").write_text(f"{example('all parts')}# changed\n")
    harness.command(tmp_path, *command("out"))
    assert "file parts.py was" in harness.log(tmp_path)


def test_a_run_whose_last_process_still_lives_is_waited_for(in_arms, capsys):
    write_plan(in_arms, {"cls": {"model.pool": "cls"}, "mean": {"model.pool": "mean"}})
    Path("out").mkdir()
    Path("out/.ledger.json.other.7.part").touch()  # of a process that starts at the same time
    ledger = pretend("plan.yaml", "out", "cls-seed0")
    folder = ledger.run_folder(Planned("cls", 0))
    folder.mkdir(parents=True)
    code = "import fcntl, time; file = open('.lock', 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(1); time.sleep(6)"
    with subprocess.Popen([sys.executable, "-uc", code], cwd=folder, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        ablate(AblateConfig(Path("plan.yaml"), out=Path("out"), workers=2))
        assert owner.wait() == 0
    assert [run.state for run in read_study(Path("out")).runs] == ["done"] * 12
    assert [path.name for path in Path("out/ledger/cls-seed0").glob("*.claim")] == ["0001.claim"]


def test_a_changed_plan_is_refused_and_changed_code_is_named(in_arms, monkeypatch, capsys):
    arms = {"cls": {"model.pool": "cls"}, "mean": {"model.pool": "mean"}}
    write_plan(in_arms, arms, 8, smallest_effect=0.02)
    pretend("plan.yaml", "out")
    config = AblateConfig(Path("plan.yaml"), out=Path("out"), workers=2)
    done = {path: path.read_bytes() for path in Path("out/runs").rglob("*") if path.is_file()}
    tune = {**TUNE, "options": {"optimizer.weight_decay": [0.1, 0.2]}}
    write_plan(in_arms, {**arms, "mean": {"model.pool": "mean", "optimizer.lr": 0.1}}, 7, tune, alpha=0.1)
    for refused in (config, replace(config, dry_run=True)):
        with pytest.raises(ledgers.UserError) as caught:
            ablate(refused)
    said = "\n".join(caught.value.problems)
    for text in (
        "compare.alpha was 0.05, is 0.1",
        "compare.max_seeds was 8, is 7: it can be raised alone",
        "arm mean: optimizer.lr was 0.001, is 0.1",
        "tune.seeds was [], is [1000]",
        "tune.options.optimizer.weight_decay was None, is [0.1, 0.2]",
    ):
        assert text in said
    write_plan(in_arms, arms, 8, smallest_effect=0.02)
    code = ledgers._code()
    monkeypatch.setattr(ledgers, "_code", lambda: {**code, "torch": "0.1"})
    ablate(config)
    assert f"changed: torch was {code['torch']}, is 0.1" in capsys.readouterr().out
    study = read_study(Path("out"))
    assert study.plan_changed == [f"torch was {code['torch']}, is 0.1"]
    assert [(run.seed, run.state) for run in study.runs] == [(seed, "done") for seed in range(8)] * 2
    assert all(path.read_bytes() == content for path, content in done.items()), "what was done stays as it is"


def test_each_arm_trains_for_the_time_of_its_baseline_by_one_timing(in_arms, monkeypatch, capsys):
    monkeypatch.setattr(timing, "SECONDS", 0.3)
    monkeypatch.setattr(timing, "ROUNDS", 2)
    sleeps = {
        arm: {"trainer.callbacks": [{"class_path": "ablation_arms.Sleeps", "init_args": {"seconds": seconds}}]}
        for arm, seconds in {"short": 0.02, "long": 0.08}.items()
    }
    write_plan(in_arms, sleeps, equal="time", fixed={"trainer.max_epochs": 3})
    pretend("plan.yaml", "out", "long-seed0", "short-seed0")
    config = AblateConfig(Path("plan.yaml"), out=Path("out"), workers=1)
    ablate(config)
    study = read_study(Path("out"))
    assert study.timing["short"]["options"] == {}
    found = study.timing["long"]
    assert 1.3 < found["ratio"] < 4.5
    assert found["base_steps"] == 24
    assert found["steps"] == pytest.approx(24 / found["ratio"], abs=1)
    long, short = [next(run for run in study.runs if (run.arm, run.seed) == (arm, 0)) for arm in ("long", "short")]
    assert (long.results["steps"], short.results["steps"]) == (found["steps"], 24)
    rows = read_metrics(Path("out") / long.folder)
    assert [row["step"] for row in rows if "val/acc" in row][-1] == found["steps"] - 1, "it is validated at its end"
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates[-1] < 0.1 * max(rates), "its schedule ends with it"
    report = make_report(study)
    assert f"trainer.max_steps={found['steps']}" in report.sentences[-1] + report.sentences[0]
    ends = [
        [row["val/acc"] for row in read_metrics(Path("out") / run.folder) if "val/acc" in row and row["step"] < by][-1]
        for by in [found["steps"]]
        for run in (long, short)
    ]
    assert (
        f"verdicts are about who wins an hour. Who wins a step is no claim here (drop compare.equal for that): 'long' "
        f"trained {found['steps']} steps, 'short' 24, and each takes {found['ratio']:.2f} times as long; by step "
        f"{found['steps']} their val/acc is {100 * ends[0]:.2f} % and {100 * ends[1]:.2f} % (1 pair)."
    ) in report.caveats[0]
    planned = next(check for check in report.checks if check.name.startswith("arms differ only"))
    assert "these differ too" not in planned.text
    before = Path("out/ledger/timing.json").read_bytes()
    ablate(config)
    assert Path("out/ledger/timing.json").read_bytes() == before
    assert capsys.readouterr().out.count("timing steps") == 1


def test_an_arm_that_cannot_be_timed_is_named_before_any_run(in_arms):
    write_plan(in_arms, {"good": {}, "bad": {"trainer.callbacks": breaking("config")}}, equal="time")
    with pytest.raises(UserError, match=r"compare.equal=time: steps could not be timed: model.depth=9 is more than"):
        ablate(AblateConfig(Path("plan.yaml"), out=Path("out"), workers=1))
    assert not Path("out/runs").exists()
    stops = [{"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/loss"}}]
    longer = {"good": {}, "bad": {"trainer.max_epochs": 3, "trainer.callbacks": stops}}
    write_plan(in_arms, longer, equal="time", fixed={"trainer.max_time": "1:0:0:0"})
    with pytest.raises(UserError) as caught:
        read_plan(Path("plan.yaml"))
    for name in ("trainer.max_time", "EarlyStopping"):
        assert f"compare.equal=time: {name} ends a schedule before its time (leave it out)" in str(caught.value)


@pytest.mark.parametrize("validations", [0, 1, 3, 30])
@pytest.mark.parametrize("per_epoch", [1, 7, 400])
def test_steps_of_equal_time_are_near_and_end_with_a_validation(validations, per_epoch):
    timer = timing.Timer(None)
    timer.per_epoch = timer.batches = per_epoch
    for steps in (1.4**power for power in range(35)):
        options = timing._options(timer, steps, validations)
        most, between = options["trainer.max_steps"], options.get("trainer.val_check_interval")
        assert abs(most - steps) <= max(1.0, 0.03 * steps)
        assert (between is None) == (validations == 0)
        assert not between or (most % between == 0 and most / between <= 1.25 * validations)
