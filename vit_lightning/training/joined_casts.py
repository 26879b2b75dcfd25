"""Casts of weights and gradients in a compiled step on a GPU, joined to one kernel each way."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Operators of libraries, into which Inductor fuses nothing."""
VIEWS = {aten.permute.default, aten.reshape.default, aten.view.default}


class JoinedCasts(CustomGraphPass):
    """Pass of Inductor over the graph of a forward or a backward pass under autocast.

    Casts of weights and biases for products, and of products that are gradients of weights, are kernels of their own:
    150 for 12 blocks. All of a kind become one operator on lists, of which Inductor makes one kernel, with the same
    numbers. Other casts stay as they are: Inductor fuses them into what makes or takes their numbers.
    """

    def __call__(self, graph: Graph) -> None:
        casts = graph.find_nodes(op="call_function", target=CAST)
        weights = [
            cast for cast in casts if _source(cast).op == "placeholder" and _takers(cast) <= PRODUCTS | {"output"}
        ]
        gradients = [cast for cast in casts if _source(cast).target in PRODUCTS and _takers(cast) == {"output"}]
        _join(graph, weights)
        _join(graph, gradients)

    def uuid(self) -> Any:
        """Returns what tells the code in Inductor's cache from that of another version of this pass."""
        return get_hash_for_files((__file__,))


def _source(node: Node) -> Node:
    """Returns what makes the numbers of a cast, before any views."""
    (source,) = node.all_input_nodes
    return _source(source) if source.target in VIEWS else source


def _takers(node: Node) -> set[Any]:
    """Returns the targets of what takes the numbers of a node, after any views."""
    return {taker for user in node.users for taker in (_takers(user) if user.target in VIEWS else {user.target})}


def _join(graph: Graph, casts: list[Node]) -> None:
    """Replaces casts by one operator where the first stands; Inductor sorts a graph after its passes."""
    if len(casts) < 2:
        return
    sources = [cast.all_input_nodes[0] for cast in casts]
    with graph.inserting_before(casts[0]):
        likes = []  # tell the types, and take no memory
        for cast, source in zip(casts, sources, strict=True):
            like = graph.call_function(aten.empty_like.default, (source,), {"dtype": cast.args[1]})
            like.meta["val"] = cast.meta["val"]
            likes.append(like)
        joined = graph.call_function(torch.ops.aten._foreach_copy.default, (likes, sources))
        joined.meta["val"] = [cast.meta["val"] for cast in casts]
        for place, cast in enumerate(casts):
            one = graph.call_function(getitem, (joined, place))
            one.meta.update(cast.meta)
            cast.replace_all_uses_with(one)
    for cast in casts:
        graph.erase_node(cast)
