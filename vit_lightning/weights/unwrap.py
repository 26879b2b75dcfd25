"""The network among the tensors of a file: without wrappers, optimizers, teachers, losses and metrics around it.

Each mapping of tensors in the file is tried under each prefix of its names; where a family has such tensors, they are a
candidate. Averages come first, then those of which most are known. A network of no family is a mapping as a whole.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vit_lightning.errors import UserError
from vit_lightning.weights.convert import has_our_names, readings_of

_PREFIXES = ("module.", "_orig_mod.", "model.", "network.", "backbone.")
"""Prefixes that are left out of the names of a network of no family."""
_SHARE = 0.2
"""Least part of a file's tensors that have the prefix of a network."""
_AVERAGED, _STUDENT, _TEACHER = (re.compile(rf"(.*_)?{word}(_.*)?") for word in ("ema", "student", "teacher"))
"""Words of a place: averaged weights come first, as timm takes them; a teacher is an average of a student like it."""
_UNUSED = re.compile(r"((vit|deit)\.)?(pooler\..*|(embeddings\.)?mask_token)|decoder[._].*|opt/state/.*")
"""Tensors of pre-training that the logits do not need."""
_BESIDE = re.compile(r"(.*_)?(criterion|loss(es)?|metrics?|acc(uracy)?\d*)(_.*)?", re.IGNORECASE)
"""First words of what is none of the network in a LightningModule: of losses and metrics."""
_HEAD = re.compile(r"((?:.*\.)?(?:head|heads|classifier))(\.\d+)?\.(weight|bias)")
"""Names of a layer in the place of a head, or in an ``nn.Sequential`` there, as beside dropout."""
_PROJECTION = re.compile(r"(.*\.)?((\w+_)?head\.(mlp\.\d+|last_layer)|head\.\d+)\.\w+")
"""Names in a head of several layers, as DINO's, iBOT's and MoCo v3's, which only their pre-training needs."""
_NORMALISER = re.compile(r"(\w+\.)?(\w*_)?(?<!running_)(mean|std|mu|sigma)", re.IGNORECASE)
"""Names of tensors with which a wrapper of a network normalises images, itself or in a part."""
_COUNTS = ("train_metrics.", "val_metrics.", "test_metrics.")
"""Prefixes of what ViTClassifier counts."""


class _Candidate(NamedTuple):
    """Tensors of a file that may be a network."""

    place: str
    """Keys of the mapping in the file, and the prefix of the names there."""
    tensors: dict[str, Tensor]
    beside: list[str]
    """Keys and names of tensors in the same mapping that are none of the network's."""
    known: int
    """Number of tensors that a family has."""

    def has(self, word: re.Pattern[str]) -> bool:
        return any(map(word.fullmatch, self.place.split(".")))

    def order(self, found: Sequence["_Candidate"]) -> tuple[bool, bool, bool]:
        """Returns how late it comes among others: averages first, a frozen teacher, losses and metrics last."""
        shapes = {(name, value.shape) for name, value in self.tensors.items()}
        students = (one for one in found if self.has(_TEACHER) and one.has(_STUDENT))
        averaged = any(shapes <= {(name, value.shape) for name, value in one.tensors.items()} for one in students)
        wrapper = re.split(r"[^.]*teacher", self.place)[0] + "distill"  # as vit-pytorch's, with a token and a head
        distilled = any(name.startswith(wrapper) and "loss" not in name for name in self.beside)
        last = self.has(_BESIDE) or (self.has(_TEACHER) and (distilled or not averaged))
        return last, not (averaged or self.has(_AVERAGED)), self.has(_STUDENT)


def unwrapped(contents: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Returns the weights without what lies around them, and sentences on what was chosen and left out."""
    chosen, notes = _chosen(contents)
    tensors = chosen.tensors
    while prefix := next((p for p in _PREFIXES if 2 * sum(n.startswith(p) for n in tensors) > len(tensors)), None):
        shorter = {name.removeprefix(prefix): value for name, value in tensors.items()}
        if len(shorter) < len(tensors):
            break
        tensors = shorter
    names = " ".join(tensors)
    for reason, left in {
        "are beside the network": chosen.beside,
        "hold no floating-point numbers": [n for n, value in tensors.items() if not value.is_floating_point()],
        "are not needed for logits": [n for n in tensors if _UNUSED.fullmatch(n) and ".ls1.gamma" not in names],
    }.items():
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            notes.append(f"left out, since they {reason}: {', '.join(left[:3])}{more}")
            tensors = {name: value for name, value in tensors.items() if name not in left}
    return tensors, tuple(notes)


def _chosen(contents: Any) -> tuple[_Candidate, list[str]]:
    """Returns the network in a file, and sentences on what else there is."""
    if not isinstance(contents, Mapping):
        raise UserError(f"it holds no weights, but {type(contents).__name__}")
    found = _networks(contents)
    if not found:
        first = ", ".join(str(name)[:50] for name in list(contents)[:3]) or "nothing"
        raise UserError(f"it holds no weights (it has {first}): of a whole network save its state_dict()")
    found = sorted(found, key=lambda one: (one.order(found), -one.known))  # and else as in the file
    chosen, notes = found[0], list[str]()
    others = [one.place for one in found[1:] if not any(one.place.startswith(two.place) for two in found if two != one)]
    if others:
        names = (text.rstrip(".") or "no key" for text in (chosen.place, ", ".join(others)))
        notes.append("the weights are those under {}, not those under {}".format(*names))
    beside = [name for name in chosen.beside if not name.startswith(tuple(others))]
    return chosen._replace(beside=beside), notes


def _networks(contents: Mapping[Any, Any]) -> list[_Candidate]:
    """Returns what may be the network: where a family has most of a ViT, else each mapping of tensors as a whole."""
    mappings = {
        place: {n: value for n, value in _with_plain_heads(tensors).items() if not n.startswith(_COUNTS)}
        for place, tensors in _mappings(contents)
    }
    found = [one for place, tensors in mappings.items() for one in _candidates(place, tensors)]
    if found:
        most = max((not one.order(found)[0], one.known) for one in found)[1]
        return [one for one in found if 2 * one.known >= most]
    for place, tensors in mappings.items():
        whole = {name: value for name, value in tensors.items() if not _BESIDE.fullmatch(name.partition(".")[0])}
        beside = [f"{place}{name}" for name in tensors if name not in whole]
        found += [_Candidate(place, whole, beside, len(whole))] if whole else []
    return found


def _mappings(contents: Mapping[Any, Any], place: str = "", depth: int = 4) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields each mapping inside of another that holds tensors, and its keys; a dict of pickle may hold itself."""
    found = {str(name): value.detach() for name, value in contents.items() if isinstance(value, Tensor)}
    arrays = [str(name) for name, value in contents.items() if type(value).__name__.endswith("multiarray._reconstruct")]
    if found and arrays:
        raise UserError(f"{place}{arrays[0]} is an array of numpy beside tensors (save it as a tensor)")
    if found:
        yield place, found
    for key, value in contents.items() if depth else ():
        if isinstance(value, Mapping) and isinstance(key, str) and not key.startswith("optim"):
            yield from _mappings(value, f"{place}{key}.", depth - 1)


def _with_plain_heads(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of which a head that is one layer has the name that the family gives it."""
    found = {name: match for name in tensors if (match := _HEAD.fullmatch(name))}
    layers = Counter(place for place, _ in {(match[1], match[2]) for match in found.values()})
    single = {name: match for name, match in found.items() if layers[match[1]] == 1}
    plain = {n: f"{m[1]}{'.head' * m[1].endswith('heads')}.{m[3]}" for n, m in single.items()}
    return {plain.get(name, name): value for name, value in tensors.items()}


def _known(tensors: dict[str, Tensor]) -> set[str]:
    """Returns the names that the family has which has most of them; all of a ViT of ours."""
    if has_our_names(tensors):
        return {*tensors}
    readings = readings_of(tensors)
    return {*readings[0].matched} if readings else set()


def _candidates(place: str, tensors: dict[str, Tensor]) -> Iterator[_Candidate]:
    """Yields the tensors of a mapping under each prefix of their names with which a family has them."""
    counts = Counter(name[: end.end()] for name in tensors for end in re.finditer(r"\w+\.", name))
    for prefix in ["", *(text for text, count in counts.items() if count >= _SHARE * len(tensors))]:
        within = [name for name in tensors if name.startswith(prefix) and not _is_beside(name[len(prefix) :])]
        inside = _of_vit({name[len(prefix) :]: tensors[name] for name in within})
        if known := _known(inside):
            outside = {name: value for name, value in tensors.items() if name not in within}
            heads = _heads_of_backbone(inside, outside, re.sub(r"\w+\.$", "", prefix))
            inside |= {head: outside[name] for name, head in heads.items()}
            beside = [f"{place}{name}{_numbers(name, outside[name])}" for name in outside if name not in heads]
            yield _Candidate(place + prefix, inside, beside, len(known) + len(heads))


def _heads_of_backbone(backbone: dict[str, Tensor], outside: dict[str, Tensor], parent: str) -> dict[str, str]:
    """Returns the names of tensors beside a backbone that are its head, and those that its family has for them.

    Args:
        backbone: tensors by the names of a family.
        outside: the other tensors of the mapping.
        parent: prefix of the module that the backbone is a part of, whose tensors come before others of equal names.
    """
    wholes = {name.removeprefix(parent): name for name in sorted(outside, key=lambda name: name.startswith(parent))}
    named = {name: outside[whole] for name, whole in wholes.items() if not _is_beside(name)}
    heads = (_known({**named, **backbone}) - backbone.keys()) & named.keys()
    return {wholes[head]: head for head in heads}


def _numbers(name: str, value: Tensor) -> str:
    """Returns mean or std as ``--config`` takes it; nothing of other tensors."""
    is_given = _NORMALISER.fullmatch(".".join(name.split(".")[-2:])) and value.numel() <= 4
    return f" {[round(number, 4) for number in value.flatten().tolist()]}" if is_given else ""


def _is_beside(name: str) -> bool:
    return any(map(re.fullmatch, (_BESIDE, _PROJECTION, _NORMALISER), (name.partition(".")[0], name, name)))


def _of_vit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of transformers' ViTModel or DeiTModel as those of its classifier."""
    is_bare = "embeddings.patch_embeddings.projection.weight" in tensors and ".layernorm_before." in " ".join(tensors)
    model = "deit" if "embeddings.distillation_token" in tensors else "vit"
    return {f"{model}.{name}": value for name, value in tensors.items()} if is_bare else tensors
