"""A function's arguments are the options of its command."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from runs import SMALL

from vit_lightning import UserError
from vit_lightning.commands.arguments import read_call
from vit_lightning.config.experiment import Experiment


def write(
    source: str,
    *images: Path,
    to: Literal["onnx", "hf"] = "onnx",
    image_size: int | None = None,
    blocks: list[int] | None = None,
    config: dict[str, Any] | None = None,
) -> tuple[Any, ...]:
    return source, images, to, image_size, blocks, config


def measure(experiment: Experiment, out: Path | None = None, *, rounds: int = 3) -> tuple[Any, ...]:
    return experiment.seed, out, rounds


@dataclass
class Plan:
    plan: Path
    _: KW_ONLY
    hours: float = 1.0


def follow(plan: Plan) -> Plan:
    return plan


def test_words_and_flags_are_arguments():
    given = ["run", "a.jpg", "--to=hf", "b.jpg", "--image-size", "48", "--blocks=[0, 5]", "--config.heads=3"]
    given += ["--config.mean=[0, 1]"]
    config = {"heads": 3, "mean": [0, 1]}
    assert read_call("write", write, given).run() == ("run", (Path("a.jpg"), Path("b.jpg")), "hf", 48, [0, 5], config)
    assert read_call("write", write, ["--source=run", "--config={heads: 3}"]).run()[-1] == {"heads": 3}
    assert read_call("follow", follow, ["a.yaml", "--hours", "2"]).run() == Plan(Path("a.yaml"), hours=2.0)


def test_an_experiment_gets_the_flags_that_the_function_does_not_take():
    call = read_call("fit", measure, [*SMALL, "new", "--rounds=5", "--seed_everything=7"])
    assert call.run() == (7, Path("new"), 5)
    with pytest.raises(UserError) as error:
        read_call("fit", measure, [*SMALL, "--rounds=many", "--model.dept=3"])
    assert [text.split(":")[0] for text in error.value.problems] == ["rounds=many must be an int", "model.dept=3"]


def test_all_mistakes_are_named_at_once():
    words = ["--to=zip", "--image_sise=4", "--blocks=all", "--to=hf", "--config.a=1", "--config.a=2"]
    with pytest.raises(UserError) as error:
        read_call("write", write, words)
    text = "\n".join(error.value.problems)
    for part in ("SOURCE is missing", "to is given twice (zip and hf)", "did you mean image_size?", "blocks=all must"):
        assert part in text
    assert "config.a is given twice" in text
    with pytest.raises(UserError, match="b: unexpected argument"):
        read_call("follow", follow, ["a.yaml", "b"])
