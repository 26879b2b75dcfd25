import torch
from PIL import Image
from runs import SMALL

from vit_lightning import CutMix, Digits, MixUp
from vit_lightning.cli import main
from vit_lightning.commands.check_data import label_texts
from vit_lightning.figures.pictures import pixels_of


def test_a_figure_is_written(in_folder, capsys):
    mixing = "--data.mixing=[{class_path: MixUp}, {class_path: CutMix}]"
    assert main(["show-batch", *SMALL, "--data.augment=[{class_path: RandAugment}]", mixing, "--out=shown"]) == 0
    assert Image.open(in_folder / "shown" / "batch.png").size[0] > 500
    assert "32 of 64 images" in capsys.readouterr().out


def test_images_are_shown_with_the_pixels_that_they_have():
    data = Digits()
    images = data.dataset("train").images[:50]
    assert torch.equal(pixels_of(data.transform.normalise(images), data.mean, data.std), images)


def test_mixed_labels_show_their_shares():
    for mixing in (MixUp(), CutMix()):
        data = Digits(mixing=[mixing])
        batch = data.model_input(next(iter(data.train_dataloader())), completed=0)
        texts = label_texts(batch, data.class_names)
        assert len(texts) == 64
        assert any(", " in text for text in texts)
        shares = [[int(part.split()[0]) for part in text.split(", ")] for text in texts if ", " in text]
        assert all(sum(share) == 100 for share in shares)
