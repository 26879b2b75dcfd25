"""``init_from``: the weights that a run starts from, and the architecture that its model takes from them."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from vit_lightning.classes import match_classes
from vit_lightning.errors import UserError
from vit_lightning.models.resize import ResizePositions
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import Size, pair, side
from vit_lightning.storage.checkpoint_files import network_state
from vit_lightning.weights.adapt import TOKENS, Adapted, adapt, heads_of, merged
from vit_lightning.weights.files import WeightsFile, naming, read_weights
from vit_lightning.weights.options import TRAINING_ALONE, describe, model_config
from vit_lightning.weights.sources import MakeNetwork, Source, class_names_of, open_source, usual_normalisation
from vit_lightning.weights.trust import refuse_untrusted

KEY = "init_from"
FROM_DATA = ("image_size", "img_size", "in_channels", "in_chans", "num_classes")
NOT_TAKEN = (*FROM_DATA, *TRAINING_ALONE)
"""Options of a model that never come from a source: those of the data, and those of training alone."""

WITHOUT_FUNCTION = (*FROM_DATA, "patch_size", "layer_scale", "final_norm", *TOKENS)
"""Options that change no function, or of whose change ``adapt`` tells."""


class FirstWeights(NamedTuple):
    """Weights of a source, fitted to the network of a run."""

    place: str
    family: str
    adapted: Adapted
    notes: tuple[str, ...]
    run: Mapping[str, Any]
    """The checkpoint, where the source is one of ours."""

    def sentence(self) -> str:
        return f"from {self.place} ({self.family}): {self.adapted.sentence()}"

    def to_json(self, interpolation: ResizePositions) -> str:
        facts = {"source": self.place, "family": self.family, "resize_positions": interpolation, "notes": self.notes}
        facts |= {name: getattr(self.adapted, name) for name in ("resized", "new", "left_out", "taken")}
        return json.dumps(facts, indent=2) + "\n"


@dataclass(frozen=True)
class InitialWeights:
    """A source of initial weights, read once: the architecture for a config, and later the weights for its network.

    Args:
        file: the weights that were read.
        make_network: makes the network of the config of a run.
        trust: whether the config in the file may name any class, and so run it.
        model: the architecture as the ``model`` of a config, over which go the options of the user's own; empty where
            it is not known, and for a network of another class, which takes weights by name. Dropouts, stochastic depth
            and sizes that follow from the data are left out.
        notes: sentences on what was assumed of it.
        unknown: why it is not known.
        images: image_size, mean and std of its images, each only where it is known, or usual for its family.
        usual: family of which most weights have that mean and std, where nothing tells those of the source.
        source: its network, once it has been opened.
    """

    file: WeightsFile
    make_network: MakeNetwork
    trust: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    images: Mapping[str, Any] = field(default_factory=dict)
    usual: str = ""
    source: Source | None = None

    def described(self, *, for_vit: bool = True, heads: Mapping[str, Any] | None = None) -> Self:
        """Returns the weights with their architecture.

        Args:
            for_vit: whether the user's config has a ViT of ours, or names no class.
            heads: the config's ``num_heads`` and ``dim_head``, which hold where the weights do not tell them.

        Raises:
            UserError: the architecture is unknown.
        """
        known = replace(self, images=facts_of_images(self.file.view or {}))
        model = (self.file.config or {}).get("model")
        if self.file.checkpoint is None and not for_vit:
            return known
        with naming(KEY, self.file):
            if self.file.checkpoint is None and not (isinstance(model, Mapping) and "class_path" in model):
                try:
                    source = self._opened(heads or {})
                    model = model_config(source.network)
                except UserError as error:
                    if _has_our_names(self.file):  # a part of a ViT, or one without its config
                        return replace(known, unknown=tuple(error.problems))
                    raise
                usual = usual_normalisation(source.network, source.family) if source.view["in_channels"] == 3 else {}
                family = source.family if usual and "mean" not in known.images else ""
                images = {**usual, **known.images}
                known = replace(known, notes=source.notes, images=images, usual=family, source=source)
            if not self.trust:
                refuse_untrusted({"model": model})
        images = {**known.images, **facts_of_images((model or {}).get("init_args", {}))}
        return replace(known, model=_architecture(model or {}), images=images)

    def _opened(self, heads: Mapping[str, Any]) -> Source:
        make, trust = self.make_network, self.trust
        return open_source(self.file, make_network=make, heads=heads, usual=False, trust=trust, key=KEY)

    def fitted(
        self,
        network: nn.Module,
        interpolation: ResizePositions,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        reset_head: bool = False,
    ) -> FirstWeights:
        """Returns the weights, fitted to a network; leaves the global random numbers as they were.

        Args:
            network: the network that is to start with them; a ViT takes those of any family, others their own names.
            interpolation: of learned positions.
            mean: of the run's images, where they are to be compared with those of the source.
            std: likewise.
            class_names: of the run's data, where they are to be compared with those of the source.
            reset_head: whether the head is new in any case.

        Raises:
            UserError: names all weights that do not fit.
        """
        place = self.file.place
        given, family, read, view = self._weights_for(network)
        notes = tuple(dict.fromkeys((*self.notes, *read)))
        differences = list(_differences(network, given))
        if differences:
            told = ", ".join(f"{name} is {ours} and not {theirs}" for name, ours, theirs in differences)
            notes += (f"the weights compute something else than in the source: {told}",)
        images = {**self.images, **view}
        ours, theirs = _normalisation(mean, std), _normalisation(images.get("mean"), images.get("std"))
        if ours and theirs and ours != theirs:
            whose = f"most weights of {self.usual}" if self.usual else "the source"
            notes += (f"images are normalised with {ours}, those of {whose} {theirs}",)
        why, known, match = "new head (reset_head)" * reset_head, view.get("class_names"), None
        if class_names is not None and not reset_head:
            count = len(known or class_names)
            try:
                match = match_classes(known, class_names, whose=f"{KEY}={place}", ours="the data", classes=count)
            except UserError:
                why = "new head: other classes"
        rows = None if match is None or match.labels == [*range(len(known or match.labels))] else match.labels
        try:
            adapted = adapt(network, given, interpolation=interpolation, reset_head=why, rows=rows)
        except UserError as error:
            # of another width the heads were the config's
            wider = getattr(network, "emb_size", None) != getattr(given, "emb_size", None)
            untold = ("scale", *("num_heads", "dim_head") * wider)
            options = [f"{name} {theirs}, not {ours}" for name, ours, theirs in differences if name not in untold]
            problems = [*options, *error.problems]
            more = f" (and {len(problems) - 6} more differences)" if len(problems) > 6 else ""
            text = f"{KEY}={place} is of another architecture than the model: {'; '.join(problems[:6])}{more}"
            way_out = f"({'; '.join(self.unknown) or '--config finetune takes those of the source'})"
            raise UserError(f"{text} {way_out}") from error
        if match is not None and match.note and any(name.startswith(heads_of(network)) for name in adapted.taken):
            notes += (f"head kept: {match.note}",)
        return FirstWeights(place, family, adapted, notes, self.file.checkpoint or {})

    def _weights_for(
        self, network: nn.Module
    ) -> tuple[nn.Module | Mapping[str, Tensor], str, tuple[str, ...], Mapping[str, Any]]:
        """Returns weights for a ViT, or under their own names for others, their family, notes, and facts of images."""
        file = self.file
        if isinstance(network, ViT):
            try:
                source = self.source or self._opened({"num_heads": network.num_heads})
                facts = {**source.view, "class_names": source.class_names}
                return source.network, source.family, source.notes, facts
            except UserError:
                if file.checkpoint is not None or not _has_our_names(file):
                    raise
        heads = [value for name, value in file.tensors.items() if name.startswith(heads_of(network))]
        facts = {**(file.view or {}), "class_names": class_names_of(file, len(heads[-1]) if heads else None)[0]}
        return file.tensors, "by name" if file.checkpoint is None else "run", file.notes, facts


def open_initial_weights(place: str, make_network: MakeNetwork, *, trust: bool = False) -> InitialWeights:
    """Reads the source of initial weights.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    return InitialWeights(read_weights(place, KEY), make_network, trust)


def _has_our_names(file: WeightsFile) -> bool:
    return any(name.startswith(("patch_embedding.projection.", "head.linear.")) for name in file.tensors)


def _architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model without regularisation and sizes of the data."""
    arguments = {name: value for name, value in model.get("init_args", {}).items() if name not in NOT_TAKEN}
    return _without_dropouts({**model, "init_args": arguments}) if model else {}


def facts_of_images(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns image_size, mean and std of colour images, as ``data`` of a config has them, where they are given."""
    size = given.get("image_size")
    sides = [size] if isinstance(size, int) else list(size) if isinstance(size, list | tuple) else []
    facts: dict[str, Any] = {}
    if len(sides) in (1, 2) and all(type(number) is int for number in sides):
        facts["image_size"] = side(pair(sides[0] if len(sides) == 1 else (sides[0], sides[1])))
    for name in ("mean", "std"):
        values = given.get(name)
        if isinstance(values, list | tuple) and len(values) == 3 and all(type(one) in (int, float) for one in values):
            facts[name] = [float(one) for one in values]
    return facts


def _without_dropouts(node: Any) -> Any:
    if not isinstance(node, Mapping):
        return node
    stay = {name: value for name, value in node.items() if not re.match(r".*dropout|drop_path", str(name))}
    return {name: _without_dropouts(value) for name, value in stay.items()}


def _normalisation(mean: Sequence[float] | None, std: Sequence[float] | None) -> str:
    """Returns mean and std in words; empty where they are not known."""
    if not mean or not std:
        return ""
    mean_text, std_text = (", ".join(f"{value:.3g}" for value in values) for values in (mean, std))
    return f"mean {mean_text} and std {std_text}"


def _differences(network: nn.Module, source: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Any, Any]]:
    """Yields options that are others in the network than in the source, with both values."""
    plain = merged(network)
    if not isinstance(plain, ViT) or not isinstance(source, ViT):
        return
    with contextlib.suppress(UserError):  # blocks of the user's own
        ours, theirs = describe(plain), describe(source)
        for name, value in ours.items():
            if name not in WITHOUT_FUNCTION and value != theirs[name]:
                yield name, value, theirs[name]


def with_resized_positions(
    checkpoint: Mapping[str, Any], network: nn.Module, image_size: int | Size, interpolation: ResizePositions
) -> tuple[dict[str, Any], str]:
    """Returns a checkpoint of a network for images of another size than it was trained on, and what was changed.

    Only positions are resized: where anything else differs, the checkpoint stays as it is.

    Raises:
        UserError: they are to be re-initialised, which only a training could make good.
    """
    size, trained = pair(image_size), _trained_size(checkpoint)
    unchanged = dict(checkpoint)
    if trained is None or trained == size:
        return unchanged, ""
    if interpolation == "reset":
        raise UserError("resize_positions=reset is for a training with init_from (choices here: bicubic, bilinear)")
    patch = getattr(network, "patch_size", None) or getattr(getattr(network, "patch_embed", None), "patch_size", None)
    grid = None if patch is None else (trained[0] // pair(patch)[0], trained[1] // pair(patch)[1])
    try:
        adapted = adapt(network, network_state(checkpoint), interpolation=interpolation, new_head=False, grid=grid)
    except UserError:
        return unchanged, ""
    changed = [*adapted.resized.values(), *adapted.new.values(), *adapted.left_out.values()]
    if any(not text.startswith("positions") for text in changed):
        return unchanged, ""
    resized = {f"network.{name}": adapted.state[name] for name in adapted.resized}
    text = f"{size[0]}x{size[1]} pixels, trained at {trained[0]}x{trained[1]}"
    return {
        **unchanged,
        "state_dict": {**checkpoint["state_dict"], **resized},
    }, f"{text} ({', '.join(changed) or 'no weight changes'})"


def _trained_size(checkpoint: Mapping[str, Any]) -> Size | None:
    given = ((checkpoint.get("config") or {}).get("data") or {}).get("init_args") or {}
    size = {**given, **(checkpoint.get("test_view") or {})}.get("image_size")
    return None if size is None else pair(tuple(size) if isinstance(size, list) else size)
