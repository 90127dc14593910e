"""Requests, batches and caches of one toy stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from oracle import POISON, mixed, token
from torch import Tensor

from sglang_pp_spec.core.frame import FrameKind
from sglang_pp_spec.core.tree_rows import TreeRows


@dataclass(eq=False)
class Request:
    """One stage's copy of a request.

    [0, committed)                    KV written, recurrent state reflects it: what the device knows
    [committed, committed + 1)        the bonus token: known, written by the next verify as node 0
    [committed, len(slots))           reserved

    ``accounted`` and ``out`` are what the host knows; with overlap they are one frame behind.
    """

    rid: str
    life: int
    prompt: list[int]
    max_new: int
    grammar: bool = False
    cached: int = 0  # prompt tokens found in the prefix cache
    out: list[int] = field(default_factory=list)
    out_on_device: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # KV slot of every position
    committed: int = 0
    accounted: int = 0
    chain: int = 0  # recurrent state
    grammar_position: int = 0  # the FSM: position of the next token
    rebuilds: int = 0
    waiting: bool = True
    finished: bool = False
    aborted: bool = False
    aborted_between_steps: bool = False
    frames_in_flight: int = 0  # of this incarnation
    chunks_in_flight: int = 0  # of this incarnation

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.out

    @property
    def tokens_on_device(self) -> list[int]:
        return self.prompt + self.out_on_device

    def state(self) -> tuple:
        """What must be equal on all stages once a frame is accounted for."""
        return self.rid, self.life, self.rebuilds, tuple(self.out), self.accounted, self.grammar_position

    def state_on_device(self) -> tuple:
        """What must be equal on all stages once a frame is adopted."""
        return self.rid, self.life, self.rebuilds, tuple(self.out_on_device), self.committed, self.chain


def chain_of(tokens: Sequence[int]) -> int:
    return mixed(0, *tokens)


@dataclass(eq=False)
class ToyBatch:
    """Requests that run together; ``trees`` and ``lengths`` follow ``reqs`` row by row."""

    kind: FrameKind
    reqs: list[Request]
    rebuilds: list[int]
    ranges: list[tuple[int, int]]  # prefill: [start, end) of this step
    samples: list[bool]
    lengths: Tensor  # [rows] int64, live
    trees: TreeRows | None = None

    @classmethod
    def of(cls, kind: FrameKind, reqs: list[Request], ranges: list[tuple[int, int]], samples: list[bool]) -> ToyBatch:
        lengths = torch.tensor([end for _, end in ranges], dtype=torch.int64)
        return cls(kind, reqs, [req.rebuilds for req in reqs], ranges, samples, lengths)

    def keep(self, rows: list[int]) -> None:
        """Recompose: these rows, in this order."""
        for name in ("reqs", "rebuilds", "ranges", "samples"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])
        index = torch.tensor(rows, dtype=torch.int64)
        self.lengths = self.lengths[index]
        if self.trees is not None:
            self.trees.filter(rows, index)

    def merge(self, other: ToyBatch) -> None:
        for name in ("reqs", "rebuilds", "ranges", "samples"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lengths = torch.cat([self.lengths, other.lengths])
        assert self.trees is not None and other.trees is not None
        self.trees.merge(other.trees)

    def alive_rows(self) -> list[int]:
        """Rows that sampled and whose request is still the one that joined."""
        return [
            row
            for row, req in enumerate(self.reqs)
            if self.samples[row] and not req.finished and not req.waiting and req.rebuilds == self.rebuilds[row]
        ]


@dataclass
class Forward:
    """What a toy stage remembers of a forward until its frame is applied."""

    reqs: list[Request]
    rebuilds: list[int]
    lengths: Tensor  # [rows] int64, before this step's accepted tokens
    slots: list[list[int]] = field(default_factory=list)  # per row: KV slots of its verify nodes
    trees: list[list[int]] = field(default_factory=list)  # per row: tokens of its verify nodes
    states: list[list[int]] = field(default_factory=list)  # per row: recurrent state after each node
    paths: list[list[int]] = field(default_factory=list)  # last stage: accepted nodes


class Pool:
    """KV slots of one stage: a token per slot, poison where nothing valid stands."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.content = [POISON] * size
        self.free = list(range(size))

    def take(self, num: int) -> list[int]:
        taken, self.free = self.free[:num], self.free[num:]
        assert len(taken) == num, "the toy scheduler took more KV than there is"
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.content[slot] = POISON
        self.free = sorted([*self.free, *slots])

    @property
    def at_baseline(self) -> bool:
        return self.free == list(range(self.size))


def right_prompt(rid: str, life: int, length: int) -> list[int]:
    return [token(rid, life, position) for position in range(length)]
