"""The parts of the guide's one file, each beside a config, started from another folder and killed once."""

from pathlib import Path

import harness
import pytest
import yaml
from fake_runs import pretend
from runs import example, logged_rows

from vit_lightning.ablation.ledger import read_study
from vit_lightning.ablation.plan import slug
from vit_lightning.storage.checkpoint_files import read_checkpoint

pytestmark = pytest.mark.full

NETWORK = """

class Mlp(nn.Sequential):
    def __init__(self, num_classes, image_size=8, width=32):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, num_classes))
"""

PARTS = {
    "block": {"model.block.class_path": "parts.Block", "model.block.scale": 0.7},
    "attention": {"model.attention.class_path": "parts.Mixer"},
    "feed-forward": {"model.feed_forward.class_path": "parts.Wide"},
    "pool": {"model.pool.class_path": "parts.Top"},
    "loss": {"loss.class_path": "parts.focal", "loss.gamma": 1.5, "data.mixing": ["MixUp"]},
    "optimizer": {"optimizer.class_path": "parts.Sign", "optimizer.beta": 0.8},
    "transform": {"data.augment": [{"class_path": "parts.darker"}]},
    "dataset": {"data.class_path": "parts.Images", "data.count": 300, "data.batch_size": 24},
    "data module": {"data.class_path": "parts.Batches", "data.batch_size": 6},
    "module": {"module.class_path": "parts.Module", "module.width": 24},
    "metric": {"metrics": [{"class_path": "parts.Worst"}]},
    "callback": {"trainer.callbacks": [{"class_path": "fault.Fault"}, {"class_path": "parts.Norms", "every": 2}]},
    "network": {"model.class_path": "parts.Mlp", "model.width": 24},
}


def nested(options: dict[str, object]) -> dict[str, object]:
    config: dict[str, object] = {}
    for key, value in options.items():
        *groups, name = key.split(".")
        node = config
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return config


def write_project(folder: Path, part: str) -> Path:
    """Writes a user's folder: a config and the file beside it; returns another folder, from which it is used."""
    options = {
        "trainer.callbacks": [{"class_path": "fault.Fault"}],
        "trainer.max_epochs": 4,
        "trainer.accelerator": "cpu",
        "trainer.log_every_n_steps": 1,
        "checkpoint.every_n_steps": 1,
        **({} if part in ("dataset", "data module") else {"data.batch_size": 162}),
        **(MODEL if part not in ("network", "module") else {}),
        **PARTS[part],
    }
    project, elsewhere = folder / "project", folder / "elsewhere"
    project.mkdir(parents=True)
    elsewhere.mkdir()
    (project / "parts.py").write_text(example("all parts") + NETWORK)
    (project / "exp.yaml").write_text(yaml.safe_dump(nested(options)))
    return elsewhere


MODEL = {"model.patch_size": 4, "model.emb_size": 16, "model.depth": 1, "model.num_heads": 2}
START = ("fit", "--config=../project/exp.yaml", "--out=run")


def outcome(folder: Path) -> dict[str, object]:
    """All that must not depend on whether a run was killed."""
    last = read_checkpoint(folder / "run/checkpoints/last.ckpt")
    return {
        "weights": last["state_dict"],
        "optimizer": last["optimizer_states"],
        "steps": last["global_step"],
        "best": read_checkpoint(folder / "run/checkpoints/best.ckpt")["state_dict"],
        "rows": logged_rows(folder / "run"),
        "results": harness.results(folder),
        "batches": harness.batches(folder),
    }


WAYS = {"KILL": -9, "TERM": 143}


@pytest.mark.parametrize(
    ("part", "way"), [*((part, "KILL") for part in PARTS), *((part, "TERM") for part in ("module", "dataset"))]
)
def test_a_part_beside_the_config_is_ended_once_and_resumes_to_the_same_bits(tmp_path, part, way):
    whole, ended = (write_project(tmp_path / name, part) for name in ("whole", "ended"))
    assert harness.command(whole, *START) == 0, harness.log(whole)[-3000:]
    # within an epoch, but for loaders that are not ours, which begin an interrupted epoch again
    fault = f"0:{24 if part == 'data module' else 13}:batch_start:{way}"
    assert harness.command(ended, *START, fault=fault) == WAYS[way], harness.log(ended)[-3000:]
    (tmp_path / "ended" / "project").rename(tmp_path / "ended" / "moved")  # the run has its own copy
    assert harness.resume(ended) == 0, harness.log(ended)[-3000:]
    assert not harness.differences(outcome(whole), outcome(ended))
    assert harness.command(ended, "test", "--ckpt=run", "--trust") == 0, harness.log(ended)[-3000:]


def test_each_part_is_an_arm_of_an_ablation(tmp_path):
    folder = write_project(tmp_path, "callback").parent / "project"
    arms = {"ours": MODEL, "beside": {**MODEL, "model.attention.class_path": "beside_the_plan.Twice"}}
    for part, options in PARTS.items():
        arms[part] = {**({} if part in ("network", "module") else MODEL), **options}
    config = {"trainer": {"max_epochs": 2, "accelerator": "cpu"}, "data": {"batch_size": 162}}
    (folder / "short.yaml").write_text(yaml.safe_dump(config))
    compare = {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 6}
    plan = {"config": "short.yaml", "arms": arms, "baseline": "ours", "compare": compare}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    text = "from parts import Mixer\n\n\nclass Twice(Mixer):\n    pass\n"
    (folder / "beside_the_plan.py").write_text(text)
    trained = [f"{slug(arm)}-seed{seed}" for arm in arms for seed in (0, 1)]
    process = harness.start(folder, "plan.yaml", "out", *trained, call=pretend)
    process.join(300)
    assert process.exitcode == 0, harness.log(folder)[-3000:]
    process = harness.start(folder, "ablate", "plan.yaml", "--out=out", "--workers=2")
    process.join(1200)
    assert process.exitcode == 0, harness.log(folder)[-3000:]
    runs = read_study(folder / "out").runs
    assert [run.state for run in runs] == ["done"] * 6 * len(arms)
    assert {run.arm for run in runs} == {"ours", "beside", *PARTS}
    page = (folder / "out" / "report.html").read_text()
    assert all(part in page for part in PARTS)
    assert len([*(folder / "out" / "runs").rglob("parts.py")]) == len(trained)
    (folder / "parts.py").write_text(f"{(folder / 'parts.py').read_text()}# changed\n")
    process = harness.start(folder, "ablate", "plan.yaml", "--out=out")
    process.join(300)
    assert "file parts.py was" in harness.log(folder)
