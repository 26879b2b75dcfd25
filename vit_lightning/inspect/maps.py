"""Maps of attention: weights, rollout, gradient-weighted relevance, mean distance."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vit_lightning.errors import UserError
from vit_lightning.inspect.watch import Attention, Grid, chosen_of, readout, watch, without_attention


@torch.no_grad()
def attention(network: nn.Module, images: Tensor, blocks: Sequence[int] | None = None) -> Tensor:
    """Returns the attention weights of each block, (b, l, h, q, k): row q says where token q attends, and sums to 1
    (DividedAfterSoftmaxAttention divides them).

    They are softmax(scale q k^T), computed again from the queries and keys of the forward pass. A ViT-L/16 at 384 has
    500 MB of them for an image: ``survey`` keeps what a head reads.

    Args:
        network: the network; it is not changed.
        images: images (b, c, H, W) as the network takes them.
        blocks: numbers of the blocks, 0 the first and -1 the last; all when not given.

    Raises:
        UserError: the network has no attention, no such blocks, or blocks whose maps have different shapes.
    """
    found: list[Attention] = []
    with watch(network, found.append):
        network(images)
    layers = encoder_layers(network, found)
    chosen = layers if blocks is None else chosen_of(layers, blocks)
    weights = [layer.weights() for layer in chosen]
    if len({each.shape for each in weights}) > 1:
        raise UserError(f"{type(network).__name__}: its layers attend to different numbers of tokens (give blocks)")
    return torch.stack(weights, dim=1)


def encoder_layers(network: nn.Module, found: Sequence[Attention]) -> list[Attention]:
    """Returns the self-attention among all attention that a network has shown; what is left is that of a pool."""
    layers = [each for each in found if each.queries.shape[2] == each.keys.shape[2]]
    if not layers:
        raise without_attention(network)
    return layers


def rollout(weights: Tensor) -> Tensor:
    """Returns the attention of each token to all tokens through all layers, (b, q, k), rows sum to 1.

    The product of 0.5 A + 0.5 I over the layers, where A is the mean over the heads (Abnar and Zuidema 2020,
    "Quantifying attention flow in transformers").

    Args:
        weights: attention weights (b, l, h, n, n).
    """
    identity = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    through = identity.expand(len(weights), -1, -1)
    for layer in weights.unbind(dim=1):
        through = roll(layer, through)
    return through


def roll(layer: Tensor, before: Tensor) -> Tensor:
    """Returns the rollout (b, n, n) after a layer of weights (b, h, n, n) from that before it."""
    mean = layer.mean(dim=1)
    mean = mean / mean.sum(dim=-1, keepdim=True)
    return 0.5 * (mean @ before + before)


def relevance(network: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Returns the relevance of each token for a class, (b, p + n): gradient-weighted attention through all layers.

    R starts as I and in each layer grows by E_h[(dy/dA * A)^+] R, with logit y, attention A and the mean E_h over the
    heads (Chefer et al. 2021, "Generic attention-model explainability", equations 5 and 6). The result is the row of
    the class token, of other pools the mean of the rows that the pool reads. The last layer is multiplied first, row
    by matrix, so that no (n, n) product is kept; dy/dA = (dy/d(A V)) V^T needs no map in the graph.

    Args:
        network: the network; it is not changed, and its weights get no gradients.
        images: images (b, c, H, W) as the network takes them; each has a backward pass of its own.
        classes: the class of each image, (b,); the predicted one when not given.

    Raises:
        UserError: the network has no attention, or gives no logits.
    """
    weights = {name: value.detach() for name, value in [*network.named_parameters(), *network.named_buffers()]}
    rows = []
    for number in range(len(images)):
        image = images[number : number + 1].detach()
        found: list[Attention] = []
        with torch.inference_mode(False), torch.enable_grad(), watch(network, found.append):
            logits = functional_call(network, weights, (image.clone().requires_grad_(),))
            if not isinstance(logits, Tensor) or logits.ndim != 2 or getattr(network, "num_classes", None) == 0:
                raise UserError(f"{type(network).__name__} gives no logits (b, classes), of which relevance would be")
            label = int(logits.argmax()) if classes is None else int(classes[number])
            if not 0 <= label < (count := logits.shape[1]):
                raise UserError(f"classes: image {number} has {label}, the model has classes 0 to {count - 1}")
            encoder_layers(network, found)
            gradients = torch.autograd.grad(logits[0, label], [each.out for each in found])
        with torch.no_grad():
            row = readout(network).to(logits)
            for each, gradient in zip(reversed(found), reversed(gradients), strict=True):
                product = (gradient @ each.values.mT)[0] * each.weights(0)
                positive = product.clamp(min=0.0).mean(dim=0)
                if len(positive) == 1:  # the query of a pool, which has no residual
                    row = F.pad(positive[0], (len(row) - positive.shape[1], 0))
                else:
                    row = row + row @ positive
        rows.append(row)
    return torch.stack(rows)


def attention_distance(weights: Tensor, grid: Grid, patch_size: tuple[float, float]) -> Tensor:
    """Returns the mean distance in pixels from a patch to the patches to which it attends, (..., h).

    Weights on the tokens before the patches are left out, and the others sum to 1 (Dosovitskiy et al. 2021, figure 7).

    Args:
        weights: attention weights (..., h, p + n, p + n).
        grid: arrangement of the tokens.
        patch_size: height and width of a patch in pixels.
    """
    y, x = (torch.arange(count) * size for count, size in zip(grid[1:], patch_size, strict=True))
    places = torch.cartesian_prod(y, x).to(weights)
    weights = weights[..., grid.prefix :, grid.prefix :]
    of_patch = (weights * torch.cdist(places, places)).sum(dim=-1) / weights.sum(dim=-1)
    return of_patch.mean(dim=-1)
