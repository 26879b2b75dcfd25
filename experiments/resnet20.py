"""The residual network for CIFAR of He et al. 2016, section 4.2, as large as the ViT of cifar10_small.yaml."""

from __future__ import annotations

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: (b, c, H, W) -> (b, width, H / stride, W / stride).

    A shortcut to another width is a 1 x 1 convolution (option B of the paper, where its CIFAR networks pad with zeros).
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        changes = stride > 1 or channels != width
        self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        sum_: Tensor = self.convolutions(images) + self.shortcut(images)
        return sum_.relu()


class ResNet20(nn.Sequential):
    """Three stages of three blocks, the mean over the image, a linear layer: (b, c, H, W) -> (b, num_classes).

    Args:
        num_classes: number of classes.
        width: channels of the first stage; the others have two and four times as many.
        in_channels: channels of the images.
    """

    def __init__(self, num_classes: int = 10, width: int = 16, in_channels: int = 3) -> None:
        widths = [width] * 3 + [2 * width] * 3 + [4 * width] * 3
        before = [width, *widths]
        super().__init__(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *(ResidualBlock(a, b, stride=b // a) for a, b in zip(before, widths, strict=False)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )
