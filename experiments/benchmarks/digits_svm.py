"""An RBF support vector machine on the split of experiments/digits.yaml, for comparison.

python experiments/benchmarks/digits_svm.py

It learns from the same 1,294 training images; C and gamma are chosen on the same 143 validation images (ties go to the
first in the list); the 360 test images are looked at once.
"""

from itertools import product

from sklearn.svm import SVC

from vit_lightning import Digits

data = Digits()
pixels = {name: data.dataset(name).images.flatten(1).numpy() / 255.0 for name in ("train", "val", "test")}
labels = {name: data.dataset(name).labels.numpy() for name in pixels}


def accuracy(model: SVC, split: str) -> float:
    return float(model.score(pixels[split], labels[split]))


models = {
    (c, gamma): SVC(C=c, gamma=gamma).fit(pixels["train"], labels["train"])
    for c, gamma in product((1.0, 3.0, 10.0, 30.0), (0.03, 0.1, 0.25, 0.5))
}
best = max(models, key=lambda key: accuracy(models[key], "val"))
print(f"C={best[0]:g} gamma={best[1]:g}: validation {accuracy(models[best], 'val'):.4f}")
correct = round(accuracy(models[best], "test") * len(labels["test"]))
print(f"test {correct / len(labels['test']):.4f} ({correct} of {len(labels['test'])})")
