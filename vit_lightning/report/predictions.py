"""Predictions of the test images, as runs have kept them: whether a result is theirs, and which images were right."""

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit_lightning.report.study import Study
from vit_lightning.report.units import unit_of


class Predicted(NamedTuple):
    """Predictions of the images of a test set."""

    image: NDArray[Any]
    """Index in the test set."""
    label: NDArray[Any]
    prediction: NDArray[Any]


Predictions = dict[str, Predicted | None]
"""Predictions of a run by the name of their accuracy; None of a file that cannot be read."""


def read_predictions(folder: Path) -> Predictions:
    """Returns the predictions of the test images and of those of further test sets, as a run has kept them."""
    found = Predictions()
    for path in sorted(folder.glob("test_predictions*.npz")):
        name = path.stem.partition("-")[2]
        found[metric := f"test/{name}/acc" if name else "test/acc"] = None
        with contextlib.suppress(Exception), np.load(path) as file:  # there is no end to what a damaged file raises
            found[metric] = Predicted(file["index"], file["label"], file["prediction"])
    return found


def checksum(predictions: Predictions) -> str:
    """Returns the checksum of what ``read_predictions`` returns."""
    arrays = [array for kept in predictions.values() if kept for array in kept]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def contradiction(folder: Path, results: Mapping[str, Any], first: str | None) -> str | None:
    """Says how an accuracy of a run is not that of its test predictions; None where it is, or nothing can tell.

    Args:
        folder: the run's.
        results: its first result.
        first: checksum of the predictions of that result, as those of a second one do not count; None where unknown.
    """
    predictions = read_predictions(folder)
    for name, kept in predictions.items() if first in (None, checksum(predictions)) else ():
        if name in results and kept and kept.label.min(initial=0) >= 0:  # a loss ignores labels below 0
            value, right, unit = float(results[name]), float(np.mean(kept.label == kept.prediction)), unit_of(name)
            if not abs(value - right) <= 0.5 / len(kept.label) + 1e-6:
                return f"{name} {unit.value(value)} % is not that of its test predictions, {unit.value(right)} %"
    return None


@dataclass(frozen=True)
class TestSets:
    """Correctness on the test images, as the runs have kept it."""

    why: str = ""
    """Reason why correctness cannot be compared over seeds; empty where it can."""
    correct: Mapping[tuple[str, int], NDArray[np.bool_]] = field(default_factory=dict)
    """Correctness of the prediction for each test image, by arm and seed."""
    differ: bool = False
    """Whether arms have other test images with the same seed."""

    @property
    def same(self) -> bool:
        """Whether all runs have the same test images."""
        return not self.why


def read_test_sets(study: Study) -> TestSets:
    """Reads the correctness of each run on each test image."""
    metric = study.compare.metric
    if not re.fullmatch("test/([^/]+/)?acc", metric):
        return TestSets(f"{metric} is not an accuracy")
    correct: dict[tuple[str, int], NDArray[np.bool_]] = {}
    images: dict[int, Predicted] = {}  # of a first run, by seed
    for run in study.done:
        predictions = read_predictions(study.folder / run.folder)
        if metric not in predictions:
            continue
        if not (kept := predictions[metric]):
            return TestSets(f"the predictions of {run.folder} cannot be read")
        if run.predictions not in (None, checksum(predictions)):  # those of a second result do not count
            continue
        if not _same_images(kept, images.setdefault(run.seed, kept)):
            which = f"{run.arm} with seed {run.seed}"
            return TestSets(f"{which} has other test images than the other arms with this seed", differ=True)
        correct[run.arm, run.seed] = kept.label == kept.prediction
    if not images:
        return TestSets("no run has kept its predictions of the test images")
    first, *others = images.values()
    same = all(_same_images(first, other) for other in others)
    return TestSets("" if same else "each seed has test images of its own", correct)


def _same_images(one: Predicted, other: Predicted) -> bool:
    return np.array_equal(one.image, other.image) and np.array_equal(one.label, other.label)
