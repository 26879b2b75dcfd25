"""Compiling by ``torch.compile``: network and loss as one graph on a GPU, a ViT block by block on a CPU."""

from functools import partial
from typing import Any

import torch
from einops import rearrange
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.blocks import Branch
from vit_lightning.models.layers import DropPath
from vit_lightning.models.vit import ViT
from vit_lightning.training.classifier import StepOutput, ViTClassifier

REPLAYS = "reduce-overhead"
"""Value of the option ``compile``, as torch.compile names the mode, with which a GPU replays CUDA graphs."""


def compile_module(
    module: LightningModule,
    batch_size: int | None,
    device: torch.device,
    *,
    ranks: int = 1,
    replays: bool = False,
    backend: Any = "inductor",
) -> list[nn.Module]:
    """Compiles a module in place; names of weights stay, and copies of the network are not compiled.

    On a GPU ``step`` of a ViTClassifier is compiled, network and loss as one graph for each shape of a batch; what
    calls the network beside it, such as a probe, runs it as it is. On a CPU, and on several GPUs, each encoder block of
    a ViT is, which the others follow with the same code: there are two graphs, for training and for evaluation,
    whatever the depth and the number of images. DDP sends the gradients of a block while those of the blocks before it
    are calculated; from one graph it gets all at the end. A module of the user's own is compiled where it holds a ViT,
    or else each of its children that has parameters.

    Args:
        module: the module.
        batch_size: images of a whole batch, for which the code of a block is made; None if it is not known.
        device: device on which it will run.
        ranks: processes that train together.
        replays: whether a GPU replays the step's kernels as CUDA graphs, one for each shape of a batch.
        backend: backend of ``torch.compile``.

    Returns:
        The compiled parts.

    Raises:
        UserError: CUDA graphs are not for this device or module.
    """
    if replays and (device.type != "cuda" or ranks > 1 or changed_steps(type(module))):
        here = f"{type(module).__name__} on {ranks} {device.type.upper()}"
        raise UserError(f"compile={REPLAYS} is for a ViTClassifier on one CUDA GPU, not {here} (give compile=true)")
    torch._dynamo.reset()  # what earlier runs of this process compiled counts towards a limit
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # probes and pictures add hooks
    torch._dynamo.config.optimize_ddp = False  # with it checkpointing does not compile; blocks need no other split
    torch._dynamo.config.recompile_limit = 64  # a graph for each shape of a batch; beyond it code is not compiled
    from torch._inductor import config as inductor  # imported only by runs that compile

    # with trainer.deterministic kernels and padding are chosen by rule, not by timings in this process
    inductor.deterministic = torch.are_deterministic_algorithms_enabled()
    for met in (torch.empty(0), nn.Parameter(torch.empty(0))):
        rearrange(met, "n -> n")  # einops keeps the types that it has met, on which the code depends
    as_one = device.type != "cpu" and ranks == 1
    options: dict[str, Any] | None = {"triton.cudagraphs": True} if replays else None
    if isinstance(module, ViTClassifier):
        if as_one and type(module).training_step is ViTClassifier.training_step:
            step = torch.compile(module.step, backend=backend, options=options, dynamic=False)
            module.step = partial(_replay, module, step) if replays else step  # type: ignore[method-assign]
            return [module]
        networks = [module.network]
    else:
        networks = [part for part in module.modules() if isinstance(part, ViT)]
        networks = networks or [part for part in module.children() if next(part.parameters(), None) is not None]
    if as_one:
        for network in networks:
            network.compile(backend=backend, options=options, dynamic=False)
        return networks
    parts = [part for network in networks for part in _parts(network)]
    # else the length of a training with patch dropout is any or fixed, as a validation came before it or not
    run = torch.compile(_call, backend=backend, options=options, dynamic=False)
    for part in parts:
        part._compiled_call_impl = partial(_call_compiled, run, part, batch_size)
    return parts


def changed_steps(kind: type[Any]) -> list[str]:
    """Returns the methods of a class by which its steps are others than those of a ViTClassifier."""
    names = ("training_step", "step", "optimizer_zero_grad")
    return [name for name in names if getattr(kind, name, None) is not getattr(ViTClassifier, name)]


def _replay(module: ViTClassifier, step: Any, /, *args: Any, **kwargs: Any) -> StepOutput:
    """Calls a step that is CUDA graphs and returns copies, as the next batch writes to the same memory."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    loss, logits, heads = step(*args, **kwargs)
    output = StepOutput(loss.clone(), logits.clone(), tuple(head.clone() for head in heads))
    if output.loss.requires_grad:
        output.loss.register_hook(partial(_refuse_gradients, module))  # type: ignore[no-untyped-call]
    return output


def _refuse_gradients(module: ViTClassifier, _: Tensor) -> None:
    """Refuses gradients that are there before a backward pass, which lie where it writes its own."""
    if any(weight.grad is not None for weight in module.parameters()):
        text = "gradients of an earlier batch are still there, which CUDA graphs would overwrite (give compile=true)"
        raise UserError(f"compile={REPLAYS}: {text}")


def _parts(network: nn.Module) -> list[nn.Module]:
    if not isinstance(network, ViT):
        return [network]
    paths = [module for module in network.encoder.modules() if isinstance(module, DropPath)]
    if paths:  # blocks differ in their rates, and the first may have none
        for branch in [module for module in network.encoder.modules() if isinstance(module, Branch)]:
            if not hasattr(branch, "drop_path"):
                branch.drop_path = DropPath(0.0)
                paths.append(branch.drop_path)
        for path in paths:
            path.rate = torch.tensor(path.p, device="cpu")
    return list(network.encoder)


def _call(part: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _call_compiled(run: Any, part: nn.Module, batch_size: int | None, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a part with its compiled code, made once for any number of images but 1, of which torch makes a constant.

    The code is that for a whole batch also if a resumed run begins with the short one at the end of an epoch, so that
    it gives the same bits.
    """
    first = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, Tensor) and first.ndim > 1 and batch_size != 1:
        if len(first) == 1:
            return part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        torch._dynamo.mark_dynamic(first, 0, hint_override=batch_size)
    return run(part, *args, **kwargs)
