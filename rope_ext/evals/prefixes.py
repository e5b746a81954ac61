"""Which prompt to read on top of which, so that no shared beginning is read twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from torch import Tensor


@dataclass(frozen=True)
class Node:
    """A prompt to be read on top of the first ``start`` tokens of its parent's; its last token is always read."""

    index: int
    start: int
    branches: list[Node] = field(default_factory=list)
    """Prompts that share more than ``start`` tokens with this one, those that share most first."""

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for branch in self.branches:
            yield from branch.walk()


def plan(prompts: Sequence[Tensor]) -> list[Node]:
    """An order of reading in which every shared beginning is read once.

    The tokens read, ``len(prompt) - start`` summed over all nodes, are the edges of the prompts' prefix tree: no order
    reads fewer.

    Args:
        prompts: token ids, each of shape (length,), at least one token.
    """
    return _plan(prompts, sorted(range(len(prompts)), key=lambda index: prompts[index].tolist()), 0)


def _plan(prompts: Sequence[Tensor], order: Sequence[int], base: int) -> list[Node]:
    """For prompts in lexical order that all share ``base`` tokens."""
    nodes = []
    while order:
        shared = [_common(prompts[one], prompts[other]) for one, other in pairwise(order)]
        most = max(range(len(shared)), key=shared.__getitem__, default=0)
        trunk = max(order[most : most + 2], key=lambda index: len(prompts[index]))
        at = order.index(trunk)
        ahead, behind = _running_minimum(shared[at:]), _running_minimum(shared[:at][::-1])[::-1]
        lengths = dict(zip([*order[:at], *order[at + 1 :]], [*behind, *ahead], strict=True))
        node = Node(trunk, base)
        branches = sorted((index for index in lengths if lengths[index] > base), key=lambda index: -lengths[index])
        for length, group in groupby(branches, key=lengths.__getitem__):
            members = set(group)
            node.branches.extend(_plan(prompts, [index for index in order if index in members], length))
        nodes.append(node)
        order = [index for index in lengths if lengths[index] <= base]
    return nodes


def _running_minimum(values: Sequence[int]) -> list[int]:
    found: list[int] = []
    for value in values:
        found.append(min(value, found[-1]) if found else value)
    return found


def _common(one: Tensor, other: Tensor) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
