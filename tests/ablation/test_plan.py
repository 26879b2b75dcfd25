import copy
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import REPOSITORY, example
from tensors import write_images

from vit_lightning.ablation import workers
from vit_lightning.ablation.ablate import forecast
from vit_lightning.ablation.ledger import open_ledger
from vit_lightning.ablation.plan import PlanReader, Tune, read_plan, slug
from vit_lightning.cli import main
from vit_lightning.config.resolve import resolve
from vit_lightning.errors import UserError
from vit_lightning.report.study import Compare


def runs_before(plan: Path) -> list[str]:
    """Commands in the first lines of a plan that train what it starts from."""
    return re.findall(r"^#   lightning (fit .*)", plan.read_text().replace("\\\n#    ", ""), re.MULTILINE)


ALIKE = [f"inductive_bias_{share}" for share in (3, 10, 30, 100)]
SHIPPED = [
    pytest.param(path, marks=pytest.mark.full if path.stem in ALIKE or runs_before(path) else (), id=path.stem)
    for path in sorted((REPOSITORY / "experiments" / "ablations").glob("*.yaml"))
]

CONFIG = """
model: {patch_size: 4, emb_size: 16, depth: 1, num_heads: 2}
trainer: {max_epochs: 1, accelerator: cpu}
checkpoint: {monitor: val/acc, mode: max}
"""
NAMED: dict[str, Any] = {
    "question": "Class token or mean?",
    "config": "config.yaml",
    "arms": {"cls": {"model.pool": "cls"}, "no token": {"model.pool": "mean", "model.class_token": False}},
    "baseline": "cls",
    "seeds": {"first": 3},
    "compare": {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 8},
}
GRID: dict[str, Any] = {
    "config": "config.yaml",
    "grid": {"model.pool": ["mean", "cls"], "model.patch_size": [2, 4]},
    "baseline": {"model.patch_size": 4, "model.pool": "cls"},
    "compare": NAMED["compare"],
}
TUNE = {"options": {"optimizer.lr": [0.001, 0.002], "model.depth": [1, 2]}, "seeds": [100, 101]}


@pytest.fixture(scope="module")
def wandb_sweeps() -> Any:
    """W&B's own reader of sweep files, whose import takes seconds: not at collection, which each process does."""
    from wandb.sdk.launch.sweeps import utils

    return utils


@pytest.fixture(scope="module")
def images_of_cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the images that the plans of CIFAR-10 look for, few and of noise."""
    folder = tmp_path_factory.mktemp("plans")
    for split, label in itertools.product(("train", "test"), range(10)):
        write_images(folder / "data" / "CIFAR-10-images" / split / str(label), 12)
    return folder


def write(plan: Any, name: str = "plan.yaml") -> Path:
    Path("config.yaml").write_text(CONFIG)
    Path(name).write_text(plan if isinstance(plan, str) else yaml.safe_dump(plan, sort_keys=False))
    return Path(name)


def problems(plan: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_plan(write(plan))
    assert all(text.startswith("plan.yaml: ") for text in caught.value.problems)
    return "\n".join(caught.value.problems)


def changed(base: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The plan with other options; those in place of which None is given are left out."""
    plan = {**copy.deepcopy(base), **options}
    return {key: value for key, value in plan.items() if value is not None}


def test_a_plan_of_named_arms(in_folder):
    plan = read_plan(write(changed(NAMED, fixed={"trainer.max_epochs": 2})))
    assert (plan.name, plan.question, plan.baseline) == ("plan", "Class token or mean?", "cls")
    assert (plan.config_files, plan.checkpoint.monitor, plan.tune) == (["config.yaml"], "val/acc", Tune({}, []))
    assert plan.seeds == [*range(3, 15)], "max_seeds of them, and half as many in place of those that fail"
    assert plan.compare == Compare("test/acc", 0.01, 8, alpha=0.05, arms="baseline", until="equivalent")
    assert plan.arms["no token"] == {"model.pool": "mean", "model.class_token": False}
    assert plan.factors == {}
    experiment = plan.experiment("no token", 4)
    assert experiment.config["model"]["init_args"]["class_token"] is False
    assert experiment.trainer["max_epochs"] == 2
    same = resolve(plan.arguments("no token", 4))
    assert (experiment.config, experiment.settings) == (same.config, same.settings), "the printed command is the run"


def test_a_plan_of_a_grid(in_folder):
    plan = read_plan(write(GRID))
    assert list(plan.arms) == ["cls, patch_size=4", "mean, patch_size=2", "mean, patch_size=4", "cls, patch_size=2"]
    assert plan.factors == {"model.pool": ["mean", "cls"], "model.patch_size": [2, 4]}
    said = problems(changed(GRID, config=None, baseline="cls"))
    assert "baseline=cls must give a value of each of model.pool, model.patch_size, such as {" in said


def test_a_plan_of_several_sizes(in_folder):
    sizes = {"small": {"model.depth": 2}, "large": {"model.depth": 4}}
    plan = read_plan(write(changed(NAMED, sizes=sizes)))
    one, *others = NAMED["arms"]
    assert plan.baseline == f"{NAMED['baseline']}, small"
    assert plan.arms[f"{others[0]}, large"] == {**NAMED["arms"][others[0]], "model.depth": 4}
    assert plan.factors == {"arms": [one, *others], "sizes": ["small", "large"]}
    wrong = changed(NAMED, sizes={"small": NAMED["arms"][others[0]], "large": {}}, compare={"arms": "pairs"})
    with pytest.raises(UserError) as error:
        read_plan(write(wrong))
    assert any("sizes: arms beside a baseline have sizes" in text for text in error.value.problems)
    assert any(text.endswith(f"arm {others[0]} gives it too (leave out one)") for text in error.value.problems)


def test_tuned_arms_and_their_trials(in_folder):
    plan = read_plan(write(changed(NAMED, tune=TUNE)))
    assert plan.tune == Tune(**TUNE)
    assert plan.tune.combinations == [
        {"optimizer.lr": lr, "model.depth": depth} for lr in (0.001, 0.002) for depth in (1, 2)
    ]
    chosen = plan.tune.combinations[3]
    for seed in (3, 4):
        tuned, same = plan.experiment("no token", seed, chosen), resolve(plan.arguments("no token", seed, chosen))
        assert (tuned.config, tuned.settings) == (same.config, same.settings)
    assert tuned.settings.optimizer.lr == 0.002
    assert tuned.data is plan.experiments["no token"].data, "its images are read once"
    trial = plan.experiment("cls", 100, chosen, trial=True)
    same = resolve(plan.arguments("cls", 100, chosen, trial=True))
    assert (trial.config, trial.settings) == (same.config, same.settings)
    assert (trial.config["test"], trial.seed, trial.settings.wandb.job_type) == (False, 100, "tuning")


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("first", [0, 3, 12, 1000])
def test_more_seeds_meet_none_of_the_tuning_and_change_none_before(first, replicated):
    lists, reader = [], PlanReader(given={"seeds": {"first": first}})
    for most in (6, 8, 12, 700):
        tune = Tune(TUNE["options"], [12, 14], most if replicated else None)
        seeds, _ = reader.seeds(Compare("test/acc", 0.01, most), tune)
        trials = {seed for place in range(len(seeds)) for seed in tune.seeds_of(place)}
        assert (len({*seeds}), trials & {*seeds}) == (most + most // 2, set())
        lists.append(seeds)
    assert all(more[: len(fewer)] == fewer for fewer, more in itertools.pairwise(lists))
    assert lists[0][0] == first or first > 3, "the first seed is left out only where tuning takes it"


def test_a_split_of_each_seed_is_the_same_for_all_arms(in_folder):
    plan = read_plan(write(changed(NAMED, seeds={"first": 3, "split": "varies"})))
    for arm in plan.arms:
        experiment, same = plan.experiment(arm, 5), resolve(plan.arguments(arm, 5))
        assert (experiment.config, experiment.settings) == (same.config, same.settings)
        assert (experiment.data.split_seed, experiment.seed) == (5, 5)
    assert plan.experiments["cls"].data.split_seed == 3
    fixed = read_plan(write(NAMED)).experiment("cls", 5)
    assert (fixed.data.split_seed, fixed.seed) == (0, 5)


def test_a_split_cannot_vary_where_the_data_has_no_split_seed(in_folder):
    Path("parts.py").write_text(example("all parts"))
    said = problems(changed(NAMED, fixed={"data.class_path": "parts.Batches"}, seeds={"split": "varies"}))
    assert "plan.yaml: seeds.split=varies: data.split_seed=0: there is no such option (choose batch_size, " in said
    assert "\n" not in said


def test_configs_from_the_working_folder_or_beside_the_plan(in_folder):
    Path("plans").mkdir()
    Path("plans/more.yaml").write_text("trainer: {max_epochs: 7}\n")
    path = write(changed(NAMED, config=["config.yaml", "more.yaml"]), "plans/plan.yaml")
    plan = read_plan(path)
    assert plan.config_files == ["config.yaml", "plans/more.yaml"]
    assert plan.experiments["cls"].trainer["max_epochs"] == 7, "later ones win"


def test_names_of_any_kind_and_length(in_folder):
    names = ["[0.9, 0.999]", "x: y", "a long " + "name " * 60, "长" * 60]
    arms = {"cls": None} | {name: {"model.depth": 2 + number} for number, name in enumerate(names)}
    read = read_plan(write(changed(NAMED, arms=arms)))
    assert read.arms["cls"] == {}, "the config as it is"
    for name in names:
        printed, experiment = resolve(read.arguments(name, 3)), read.experiment(name, 3)
        assert printed.settings.wandb.job_type == name
        assert printed.config == experiment.config
        assert max(map(len, experiment.settings.wandb.tags)) <= 64
    names += ["{a}", "1.0", "均值", "类标记", "की", "का"]
    assert len({slug(name) for name in names}) == len(names)
    assert max(len(slug(name).encode()) for name in names) <= 80


def test_all_pairs_need_no_baseline(in_folder):
    compare = {**NAMED["compare"], "arms": "pairs"}
    assert read_plan(write(changed(NAMED, baseline=None, compare=compare))).baseline == "cls", "the first one"
    said = problems(changed(NAMED, baseline=None))
    assert "baseline is missing: it must be an arm (choose cls; no token)" in said


def test_all_that_is_wrong_with_a_plan_at_once(in_folder):
    said = problems(
        {
            "name": "a/b",
            "alpha": 0.05,
            "armes": 3,
            "trainer.max_epochs": 3,
            "config": "nowhere.yaml",
            "fixed": {"model.pool": "cls"},
            "arms": {
                "cls": {"model.pool": "cls"},
                "report": {"seed_everything": 1},
                3: {"model.dept": 2},
                "nested": {"data": {"init_args": {"split_seed": 1}}, "model": [{"pool": "cls"}]},
            },
            "baseline": "clss",
            "seeds": {"first": 2**32 - 5, "split": "both"},
            "tune": {"options": {"model.pool": ["mean", "mean"], "test": [True, False]}, "seeds": [1, 1]},
            "compare": {"metric": "test/acc", "smallest_effect": 1.5, "alpha": 2, "max_seeds": 4, "disagreement": 0},
        }
    )
    for text in (
        "alpha: there is no such option of a plan (did you mean compare.alpha?)",
        "armes: there is no such option of a plan (did you mean arms?)",
        "trainer.max_epochs: there is no such option of a plan (options that all arms share go under fixed)",
        "name=a/b must be a plain name",
        "config=nowhere.yaml cannot be read: No such file",
        "fixed.model.pool: arm cls gives it too",
        "arms.report.seed_everything: it identifies the run",
        "arms.nested.data.split_seed: it identifies the run",
        "arm report: this name has a meaning of its own",
        "arm 3: a name is a text: write it in quotes",
        "arm 3: model.dept=2: there is no such option (did you mean model.depth?)",
        "baseline=clss must be an arm (choose cls; report; 3; nested)",
        "seeds.split=both must be one of fixed, varies",
        "tune.options.model.pool: mean comes twice",
        "tune.options.test: it identifies the run",
        "tune.seeds: 1 comes twice",
        "compare.smallest_effect=1.5 must be above 0 and below 1 (0.005 is half a point)",
        "compare.alpha=2 must be above 0 and below 0.5",
        "compare.disagreement=0 must be above 0 and below 1",
        "compare.max_seeds=4 must be at least 6: the first analysis takes 6 pairs",
    ):
        assert text in said, text


NO_CONFIG = changed(NAMED, config=None)
"""What is wrong with such a plan is found without a config, and fast."""


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"config": 3}, "config=3 must be a path"),
        ({"compare": None}, "compare is missing: {metric: test/acc"),
        ({"compare": "test/acc"}, "compare=test/acc must hold metric, smallest_effect, max_seeds, alpha"),
        (
            {"compare": {"metrik": "test/acc", "arms": "all", "until": "better"}},
            [
                "compare.metrik=test/acc: there is no such option (did you mean compare.metric?)",
                "compare.arms=all must be one of baseline, pairs",
                "compare.until=better must be one of equivalent, not better",
                "compare.smallest_effect is missing",
                "compare.max_seeds is missing",
            ],
        ),
        ({"compare": {**NAMED["compare"], "max_seeds": 1001}}, "compare.max_seeds=1001 must be at most 1000"),
        (
            {"compare": {**NAMED["compare"], "arms": "pairs", "until": "not better"}},
            "compare.until=not better asks about arms beside a baseline, not compare.arms=pairs",
        ),
        ({"seeds": {"first": 2**32 - 7}}, "the last of 12 seeds is above 2**32 - 1"),
        ({"seeds": {"first": -1}}, "seeds.first=-1 must be at least 0"),
        ({"seeds": [0, 1]}, "seeds=[0, 1] must hold first, split"),
        ({"arms": None}, "give arms: {NAME: {OPTION: VALUE}} or grid: {OPTION: [VALUES]}, one of the two"),
        ({"arms": ["cls", "mean"]}, "arms=['cls', 'mean'] must hold {NAME: {OPTION: VALUE}}"),
        ({"arms": {"cls": {}}}, "there is one arm only"),
        ({"arms": {"cls": {}, "mean": "mean"}}, "arms.mean=mean must hold {OPTION: VALUE}"),
        ({"arms": {"cls": {"model.pool": "cls"}, "CLS": {"model.pool": "cls"}}}, "two names give the same folder"),
        ({"arms": None, "grid": {"model.pool": "cls"}}, "grid.model.pool=cls must be a list of values"),
        ({"tune": {"options": {"optimizer.lr": [1]}, "seeds": [3]}}, "at least two values"),
        ({"tune": {"options": {"optimizer.lr": 1}}}, ["must be a list", "tune.seeds is missing"]),
        (
            {"tune": {"options": {"optimizer.lr": ["0,1", "0-1"]}, "seeds": [100]}},
            "tune.options: two values give the same folder",
        ),
        ({"name": "..", "question": {"Class token": "or mean?"}}, ["name=.. must be a plain name", "must be a string"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_plans_that_could_give_no_answer_are_refused(in_folder, options, texts):
    said = problems(changed(NO_CONFIG, **options))
    for text in [texts] if isinstance(texts, str) else texts:
        assert text in said


def test_what_is_wrong_with_the_config_names_the_arm(in_folder):
    plan = changed(NAMED, fixed={"optimizer.lr": "fast"})
    plan["arms"]["no token"]["model.pol"] = "mean"
    plan["tune"] = {"options": {"trainer.max_epochs": [1, "many"]}, "seeds": [0, 3]}
    said = problems(plan).splitlines()
    assert "plan.yaml: arm no token: model.pol=mean: there is no such option (did you mean model.pool?)" in said
    assert "plan.yaml: optimizer.lr=fast must be a finite float" in said, "once, as all arms share it"
    assert "plan.yaml: tune.options: trainer.max_epochs=many must be an int or null" in said


def test_what_selects_what_is_reported_and_what_is_tried(in_folder):
    plan = changed(
        NAMED, fixed={"trainer.limit_test_batches": 0, "checkpoint.monitor": "train/loss", "checkpoint.mode": "min"}
    )
    plan["compare"]["metric"] = "val/acc"
    said = problems(plan)
    assert "compare.metric=val/acc must be a metric of test (choose test/loss, test/acc" in said
    assert "checkpoint.monitor=train/loss must be a metric of validation in an ablation (choose val/loss, " in said
    assert "without a test there is nothing to compare" in said
    plan = changed(NAMED)
    plan["arms"]["same"] = {"model.pool": "cls", "model.class_token": True}
    plan["arms"]["other"] = {"checkpoint.monitor": "val/loss", "checkpoint.mode": "min"}
    said = problems(plan)
    assert "cls and same come to the same config: there is nothing to compare" in said
    assert "all arms must select by the same metric, not by val/acc (max), val/loss (min)" in said


def test_further_metrics_and_sets(in_folder, monkeypatch):
    rules = {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 8}
    more = {"fixed": {"trainer.max_epochs": 1, "data.num_workers": 0}}
    data = CONFIG + "data: {also_test: {shifted: {batch_size: 32}}}\n"
    path = write(changed(NAMED, compare={**rules, "then": {"test/ece": 0.01, "test/shifted/acc": 0.02}}, **more))
    Path("config.yaml").write_text(data)
    plan = read_plan(path)
    assert plan.compare.then == {"test/ece": 0.01, "test/shifted/acc": 0.02}
    assert plan.experiments["cls"].data.further["shifted"].batch_size == 32
    wrong = {"test/ece": 1.5, "test/acc": 0.01, "test/other/acc": 0.1}
    said = problems(changed(NAMED, compare={**rules, "then": wrong, "arms": "pairs"}))
    assert "compare.then.test/ece=1.5 must be above 0 and below 1" in said
    assert "compare.then: test/acc is compare.metric" in said
    assert "compare.then.test/other/acc must be a metric of test (choose test/loss, test/acc" in said
    assert "compare.then compares arms beside a baseline, not compare.arms=pairs" in said
    arms = {"cls": {}, "mean": {"data.also_test": {"shifted": "shifted"}}}
    assert "arms.mean.data.also_test: it identifies the run or chooses the images" in problems(
        changed(NAMED, arms=arms)
    )
    path = write(changed(NAMED, compare={**rules, "metric": "test/shifted/acc"}, **more))
    Path("config.yaml").write_text(data)
    plan = read_plan(path)
    monkeypatch.setattr(plan.experiments[plan.baseline].data.further["shifted"], "image_count", lambda split: 91)
    assert "of 91 test images" in forecast(plan, open_ledger(Path("ablation"), plan)[0], 1)[0]


def test_the_goal_of_a_metric_that_its_name_does_not_tell_must_be_given(in_folder):
    Path("own_goal.py").write_text("from vit_lightning import ViTClassifier\n\n\nclass Own(ViTClassifier):\n    pass\n")
    plan = changed(NAMED, fixed={"module": "own_goal.Own"})
    plan["compare"]["metric"] = "test_nll"
    assert "compare.goal is missing: whether higher (maximize) or lower values (minimize) of test_nll" in problems(plan)
    plan["compare"]["goal"] = "minimize"
    ledger, _ = open_ledger(Path("ablation"), read_plan(write(plan)))
    assert ledger.study().goal == "minimize"
    plan["compare"]["metric"] = "test/acc"
    assert "compare.goal=minimize: that of test/acc is maximize (leave it out)" in problems(plan)


def test_the_sweep_of_the_guide(wandb_sweeps, tmp_path):
    """Its runs are the command with other rates; W&B's own reader takes the file."""
    page = (REPOSITORY / "notebooks" / "wandb.md").read_text(encoding="utf-8")
    (tmp_path / "lr.yaml").write_text(re.search(r"```yaml\n(# wandb sweep.*?)```", page, re.DOTALL)[1])
    sweep = wandb_sweeps.load_sweep_config(str(tmp_path / "lr.yaml"))
    args = wandb_sweeps.create_sweep_command_args({"args": {"optimizer.lr": {"value": 0.002}}})["args"]
    experiment = resolve([*sweep["command"][2:-1], *args])
    assert (experiment.settings.optimizer.lr, experiment.resume) == (0.002, "auto")
    assert sweep["metric"]["name"] == experiment.settings.checkpoint.monitor


@pytest.mark.parametrize("path", SHIPPED)
def test_shipped_plans(path, monkeypatch, images_of_cifar10):
    monkeypatch.chdir(images_of_cifar10)
    for command in runs_before(path):
        assert main([*shlex.split(command), "--trainer.max_epochs=1", "--test=false"]) == 0
    assert len(read_plan(path).arms) > 1


def test_a_dry_run_says_what_the_plan_can_show_and_writes_nothing(in_folder, capsys):
    path = write(changed(NAMED, fixed={"data.class_path": "Digits"}, tune=TUNE))
    assert main(["ablate", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "if on 5 % of 360 test images one is right and the other wrong" in said
    assert "; at most 16 runs\n  tuning before that: 16 runs\n" in said
    assert sorted(path.name for path in in_folder.iterdir()) == ["config.yaml", "plan.yaml"]


def test_by_default_a_gpu_has_as_many_runs_as_were_fastest_and_as_it_holds(in_folder, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    path = write(changed(NAMED, fixed={"data.class_path": "Digits", "trainer.accelerator": "auto"}))
    plan = read_plan(path)
    # all that were measured; by the cores; by the smaller memory, of which a run takes 1.02 GB
    for gigabytes, cores, count in ((141, 64, 16), (141, 8, 8), (3.7, 64, 6)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: range(cores))
        monkeypatch.setattr(workers, "free_memory", lambda device, free=gigabytes: 1e9 * (free + device.index))
        assert workers.workers_of("auto", plan, 1) == count
    monkeypatch.setattr(workers, "free_memory", lambda _: 1e8)
    assert main(["ablate", str(path), "--dry-run"]) == 0
    assert "\n  2 at a time on 2 GPUs, as cores, memory and speed allow, 1 thread each" in capsys.readouterr().out
