from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml
from runs import REPOSITORY, SMALL
from wandb.sdk.launch.sweeps import utils as wandb_sweeps

from vit_lightning.ablation.ablate import read_arguments
from vit_lightning.ablation.plan import read_plan, slug
from vit_lightning.ablation.wandb_sweep import plain_flags
from vit_lightning.config.files import read_flags
from vit_lightning.config.resolve import resolve
from vit_lightning.errors import UserError

SHIPPED = sorted((REPOSITORY / "experiments" / "ablations").glob("*.yaml"))

NAMED = {
    "program": "vit_lightning",
    "command": ["lightning", "fit", "--config", "page.yaml", *SMALL, "${args}"],
    "method": "grid",
    "metric": {"name": "val/acc", "goal": "maximize"},
    "parameters": {
        "arm": {
            "values": [
                {"name": "cls", "model.pool": "cls", "optimizer.lr": 0.002},
                {"name": "no token", "model.pool": "mean", "model.class_token": False},
            ]
        },
        "seed_everything": {"values": [3, 4]},
        "ablation": {
            "value": {"name": "pool", "baseline": "cls", "report": "test/acc", "smallest_effect": 0.01, "alpha": 0.05}
        },
    },
}
GRID = copy.deepcopy(NAMED)
del GRID["parameters"]["arm"]
GRID["parameters"] |= {"model.pool": {"values": ["mean", "cls"]}, "model.patch_size": {"values": [2, 4]}}
GRID["parameters"]["ablation"]["value"]["baseline"] = {"model.pool": "cls", "model.patch_size": 4}


def write(plan: dict) -> Path:
    Path("page.yaml").write_text("optimizer: {weight_decay: 0.1}\n")
    Path("plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    return Path("plan.yaml")


def problems(plan: dict) -> str:
    with pytest.raises(UserError) as caught:
        read_plan(write(plan))
    return "\n".join(caught.value.problems)


def test_a_plan_of_named_arms(in_folder):
    plan = read_plan(write(NAMED))
    assert (plan.name, plan.config_file, plan.seeds, plan.baseline) == ("pool", "page.yaml", [3, 4], "cls")
    assert plan.arms["no token"] == {"model.pool": "mean", "model.class_token": False}
    assert plan.factors == {}
    experiment = plan.experiment("no token", 4)
    assert experiment.config["model"]["init_args"]["class_token"] is False
    same = resolve(plan.words("no token", 4))
    assert (experiment.config, experiment.settings) == (same.config, same.settings), "the printed command is the run"


def test_a_plan_of_a_grid(in_folder):
    plan = read_plan(write(GRID))
    assert list(plan.arms) == ["cls, patch_size=4", "mean, patch_size=2", "mean, patch_size=4", "cls, patch_size=2"]
    assert plan.factors == {"model.pool": ["mean", "cls"], "model.patch_size": [2, 4]}
    other = copy.deepcopy(GRID)
    other["parameters"]["ablation"]["value"]["baseline"] = {"model.patch_size": 4, "model.pool": "cls"}
    assert read_plan(write(other)).baseline == "patch_size=4, cls", "in the order that W&B's agent has to go by"
    other["parameters"]["ablation"]["value"]["baseline"] = "cls"
    assert "ablation.baseline=cls must be a value of each of model.pool, model.patch_size" in problems(other)


def test_a_misspelt_key_is_named_beside_what_else_is_wrong(in_folder):
    plan = copy.deepcopy(GRID)
    plan["parameters"]["model.dept"] = {"values": [1, 2]}
    plan["parameters"]["seed_everything"]["values"] = [1, 1]
    said = problems(plan)
    assert "ablation.baseline={'model.pool': 'cls', 'model.patch_size': 4} must be a value of each of" in said
    assert "did you mean model.depth?" in said
    assert "1 comes twice" in said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan.update(metric="val/acc"), "metric=val/acc must be"),
        (lambda plan: _rules(plan).update(baseline=None), "ablation.baseline=None is no arm"),
        (lambda plan: _rules(plan).update(name=".."), "ablation.name=.. must be a plain name"),
        (lambda plan: _arms(plan)[1].update(name="report"), "arm report: this name has a meaning of its own"),
        (lambda plan: plan["command"].insert(-1, "--trainer.fast_dev_run=true"), "leaves no results"),
        (lambda plan: plan["command"].insert(-1, "--trainer.limit_test_batches=0"), "there is nothing to report"),
        (lambda plan: plan["parameters"].pop("seed_everything"), "seed_everything.values must be a list"),
        (
            lambda plan: (
                _arms(plan).append({"name": "same", "model.pool": "cls", "optimizer.lr": 2.0e-3, "test": True})
                or _arms(plan)[-1].pop("test")
                or _arms(plan)[-1].update({"model.class_token": True})
            ),
            "cls and same come to the same config",
        ),
    ],
)
def test_plans_that_could_give_no_answer_are_refused(in_folder, change, text):
    plan = copy.deepcopy(NAMED)
    change(plan)
    assert text in problems(plan)


def _rules(plan: dict) -> dict:
    return plan["parameters"]["ablation"]["value"]


def _arms(plan: dict) -> list:
    return plan["parameters"]["arm"]["values"]


def test_names_of_any_kind_and_length(in_folder):
    plan = copy.deepcopy(NAMED)
    names = ["[0.9, 0.999]", "{a}", "1.0", "x: y", "a long " + "name " * 60]
    _arms(plan)[1:] = [{"name": name, "model.depth": 2 + number} for number, name in enumerate(names)]
    read = read_plan(write(plan))
    for name in names:
        printed, experiment = resolve(read.words(name, 3)), read.experiment(name, 3)
        assert printed.settings.wandb.job_type == name
        assert printed.config == experiment.config
        assert len(slug(name)) <= 80
        assert max(map(len, experiment.settings.wandb.tags)) <= 64
    assert len({slug(name) for name in names}) == len(names)


def test_the_command_of_a_trusted_plan_says_so(in_folder):
    path = write(NAMED)
    assert read_plan(path, trust=True).command("cls", 3).endswith("--trust-config")
    assert "--trust-config" not in read_plan(path).command("cls", 3)


def test_all_that_is_wrong_with_a_plan_at_once(in_folder):
    plan = copy.deepcopy(NAMED)
    plan["method"], plan["early_terminate"] = "bayes", {}
    plan["parameters"]["seed_everything"]["values"] = [0, 1, 0]
    plan["parameters"]["arm"]["values"].append({"name": "cls", "seed_everything": 1})
    plan["parameters"]["ablation"]["value"] = {
        "name": "a/b",
        "baseline": "clss",
        "report": "test/acc",
        "alpa": 0.05,
        "alpha": 2,
    }
    said = problems(plan)
    for text in (
        "early_terminate: an ablation has no such key",
        "method=bayes must be grid",
        "seed_everything: 0 comes twice",
        "arm cls comes twice",
        "arm cls: seed_everything: it identifies the run",
        "ablation.alpa: there is no such option",
        "ablation.smallest_effect is missing",
        "ablation.name=a/b must be a plain name",
        "ablation.alpha=2 must be a number above 0 and below 0.5",
        "ablation.baseline=clss is no arm (choose cls; no token)",
    ):
        assert text in said


def test_what_is_wrong_with_the_page_names_the_arm(in_folder):
    plan = copy.deepcopy(NAMED)
    plan["parameters"]["arm"]["values"][1]["model.pol"] = "mean"
    plan["command"].insert(-1, "--optimizer.lr=fast")
    said = problems(plan).splitlines()
    assert "plan.yaml: arm no token: model.pol=mean: there is no such option (did you mean model.pool?)" in said
    assert any("optimizer.lr=fast must be a finite float" in line for line in said)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"metric": {"name": "test/acc", "goal": "maximize"}}, "metric.name=test/acc is no metric of validation"),
        ({"metric": {"name": "val/loss", "goal": "minimize"}}, "but the config selects its best checkpoint by val/acc"),
        ({"metric": {"name": "val/acc", "goal": "minimize"}}, "but the config has checkpoint.mode=max"),
        ({"command": ["lightning", "fit", "${args}"]}, "command names no config"),
        ({"command": "lightning fit"}, "command must be"),
    ],
    ids=["test", "other", "goal", "page", "words"],
)
def test_what_chooses_must_be_what_the_page_chooses_by(in_folder, change, text):
    assert text in problems({**copy.deepcopy(NAMED), **change})


def test_only_the_test_is_reported(in_folder):
    plan = copy.deepcopy(NAMED)
    plan["parameters"]["ablation"]["value"]["report"] = "val/acc"
    assert "ablation.report=val/acc is no metric of test (choose test/loss, test/acc" in problems(plan)
    plan["command"].insert(-1, "--test=false")
    assert "test=false or trainer.limit_test_batches=0: without a test" in problems(plan)


def test_arms_that_do_not_differ(in_folder):
    plan = copy.deepcopy(GRID)
    plan["parameters"]["model.pool"]["values"] = ["cls", "cls"]
    assert "parameters.model.pool: cls comes twice" in problems(plan)
    plan = copy.deepcopy(NAMED)
    plan["parameters"]["arm"]["values"][1] = {"name": "CLS", "model.pool": "cls", "optimizer.lr": 0.002}
    said = problems(plan)
    assert "two names give the same folder" in said
    assert "change the same keys to the same values" in said


def agent_flags(plan: dict, values: dict) -> list[str]:
    """What W&B's agent would put in the place of ``${args}``, by its own code."""
    args = {key: {"value": value} for key, value in values.items()}
    return list(wandb_sweeps.create_sweep_command_args({"args": args})["args"])


def test_a_run_of_w_and_b_s_agent_is_the_same_run(in_folder):
    """Group, arm and seed too."""
    clash = copy.deepcopy(NAMED)
    clash["command"].insert(-1, "--model.class_token=true")
    clash["parameters"]["model.pool"] = {"value": "cls"}
    clash["parameters"]["wandb.notes"] = {"value": "a: b: c"}
    clash["parameters"]["trainer.callbacks"] = {
        "value": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "stopping_threshold": None}}]
    }
    for plan, index in ((NAMED, 1), (GRID, 1), (clash, 1)):
        read = read_plan(write(plan))
        parameters = plan["parameters"]
        values = {key: said["value"] if "value" in said else said["values"][index] for key, said in parameters.items()}
        flags = [*plan["command"][2:-1], *agent_flags(plan, values)]
        words = [f"--{key}={value}" for key, value in plain_flags(read_flags(flags))]
        arm = "cls, patch_size=4" if plan is GRID else "no token"
        experiment = resolve(words)
        assert experiment.config == read.experiment(arm, 4).config
        wandb = experiment.settings.wandb
        assert (wandb.group, wandb.job_type, wandb.tags) == ("pool", arm, ["pool", arm, "seed4"])


def test_an_arm_without_an_ablation(in_folder):
    with pytest.raises(UserError, match="arm=x is for a run of an ablation"):
        plain_flags([("arm", "x")])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_plans_are_sweeps_of_w_and_b(path, monkeypatch):
    """Its client reads them; its schema, where the package ``sweeps`` is there, has nothing against them."""
    monkeypatch.chdir(REPOSITORY)
    plan = read_plan(path)
    sweep = wandb_sweeps.load_sweep_config(str(path))
    assert sweep is not None
    # what the schema wants, as far as our files use it: no keys of others, and parameters with value or values alone
    known = {"program", "command", "method", "metric", "parameters", "name", "description", "project", "entity", "kind"}
    assert set(sweep) <= known
    assert all(set(said) in ({"value"}, {"values"}) for said in sweep["parameters"].values())
    json.dumps(sweep)
    sweeps = pytest.importorskip("sweeps", reason="W&B's schema: pip install --no-deps sweeps jsonref")
    assert sweeps.schema_violations_from_proposed_config(sweep) == []
    assert sweeps.schema_violations_from_proposed_config({**sweep, "ablation": {}}), "why the rules are a parameter"
    runs: list = []
    while (run := sweeps.next_run(sweep, runs)) is not None:
        run.state = sweeps.RunState.finished
        runs.append(run)
    assert len(runs) == len(plan.arms) * len(plan.seeds)


def test_arguments_of_the_command():
    config = read_arguments(["plan.yaml", "--dry-run", "--workers", "3", "--add-seeds=4"])
    assert (config.file, config.dry_run, config.workers, config.add_seeds) == (Path("plan.yaml"), True, 3, 4)
    assert read_arguments(["plan.yaml", "--workers=auto"]).workers == "auto"
    for words in (["--dry-run", "a.yaml"], ["--workers", "2", "a.yaml"], ["--retry", "--out", "x", "a.yaml"]):
        assert read_arguments(words).file == Path("a.yaml")
    with pytest.raises(UserError, match="patience=0 must be above 0"):
        read_arguments(["plan.yaml", "--patience=0"])
    with pytest.raises(UserError) as caught:
        read_arguments(["--dryrun", "--workers=x", "--add-seeds=0", "--launcher=pbs"])
    said = "\n".join(caught.value.problems)
    for text in (
        "did you mean dry_run",
        "workers=x must be",
        "add_seeds=0 must",
        "launcher=pbs must be",
        "give a plan",
    ):
        assert text in said
