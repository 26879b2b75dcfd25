"""Files of a run as values that W&B shows: tables, interactive plots, pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_lightning.storage.folder import read_json

CLASS_CURVES = 20
"""Largest number of classes whose accuracy has a curve each."""
IMAGES = "images"
"""Folder in ``validation`` with the images of the table of predictions, as INDEX.png."""


def validation_values(wandb: Any, path: Path) -> dict[str, Any]:
    """Returns pictures and curves of a validation by names, from the JSON file of ``ValidationPictures``."""
    facts, epoch = read_json(path), path.stem.removeprefix("epoch-")
    pictures = {f"images/{name}": path.with_name(f"{name}-{epoch}.png") for name in ("confusion", "attention")}
    pictures["images/validation"] = path.with_suffix(".png")
    values = {name: wandb.Image(str(file)) for name, file in pictures.items() if file.is_file()}
    ranks = map(float, facts.get("effective_rank", ()))
    values |= {f"effective_rank/{number}": rank for number, rank in enumerate(ranks)}
    classes = zip(facts["classes"], facts["class_accuracy"], strict=True)
    if len(facts["classes"]) <= CLASS_CURVES:
        values |= {f"val_class/{name}": accuracy for name, accuracy in classes if accuracy is not None}
    return values


def tables(wandb: Any, folder: Path) -> dict[str, Any]:
    """Returns tables of all validations in a run folder, and an interactive confusion matrix of the last one.

    Each is an artifact, for which wandb asks the server and waits: they go at the end of a run.
    """
    files = map(read_json, sorted((folder / "validation").glob("epoch-*.json")))
    validations = [facts for facts in files if "sample" in facts]  # else it is damaged
    if not validations:
        return {}
    return {
        "validation/predictions": _predictions(wandb, validations, folder / "validation" / IMAGES),
        "validation/confusion": _confusion(wandb, validations[-1]),
    }


def _predictions(wandb: Any, validations: Sequence[Mapping[str, Any]], folder: Path) -> Any:
    """Returns the table of the images on the pictures, a row for each in each validation."""
    images = {path.stem: wandb.Image(str(path)) for path in folder.glob("*.png")}
    rows = [
        [facts["epoch"], index, images.get(str(index)), names[label], names[predicted], label == predicted, confidence]
        for facts in validations
        for names, sample in [(facts["classes"], facts["sample"])]
        for index, label, predicted, confidence in zip(
            *(sample[name] for name in ("index", "label", "prediction", "confidence")), strict=True
        )
    ]
    columns = ["epoch", "index", "image", "label", "prediction", "right", "confidence"]
    return wandb.Table(columns=columns, data=rows)


def _confusion(wandb: Any, facts: Mapping[str, Any]) -> Any:
    """Returns W&B's interactive confusion matrix."""
    names, columns = facts["classes"], ["Actual", "Predicted", "nPredictions"]
    rows = [[names[label], names[predicted], images] for label, predicted, images in facts["confusion"]]
    fields, title = {name: name for name in columns}, {"title": "confusion of the validation images"}
    return wandb.plot_table("wandb/confusion_matrix/v1", wandb.Table(columns=columns, data=rows), fields, title)
