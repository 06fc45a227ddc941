"""Ranks that are threads of the test's process and exchange encoded messages; planner, storage and codec are real.

Or the channels of such ranks, over loopback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast import DefaultSavePlanner, Metadata, NativeWriter
from holdfast._ranks import rendezvous
from holdfast._ranks.channel import Channel
from holdfast._saver import Saving, _save
from holdfast._torch_codec.pickles import decode_message, encode_message

ATTEMPT = "attempt"


def channels(world: int, coordinator: int = 0) -> tuple[list[Channel], rendezvous.Address]:
    """The ends of the channel between so many ranks, and where the coordinator listens."""
    listener, address = rendezvous.serve(is_first=True)

    def channel(rank: int) -> Channel:
        if rank == coordinator:
            return Channel(
                rank=rank, job_ranks=range(world), coordinator=coordinator, listener=listener, token=address.token
            )
        dial = rendezvous.caller(lambda limit_s: address, rank=rank, coordinator=coordinator)
        return Channel(rank=rank, job_ranks=range(world), coordinator=coordinator, dial=dial)

    return [channel(rank) for rank in range(world)], address


class Board:
    """What threads that play ranks share; ``rounds`` has what was sent in each step, by rank."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=300)
        self.parts: list[Any] = [None] * ranks
        self.wholes: list[Any] = [None] * ranks
        self.rounds: list[list[Any]] = []
        self.bytes: list[list[int]] = []
        self.error: BaseException | None = None


class ThreadRanks:
    """The ranks of one save, as one of them sees them; what fails on one fails on all."""

    def __init__(self, rank: int, board: Board, kept: dict[object, Any]) -> None:
        self.rank, self.size, self.is_coordinator = rank, len(board.parts), rank == 0
        self.kept = kept
        self._board = board

    def _step(self, local: Callable[[], Any], merge: Callable[[list[Any]], list[Any]]) -> Any:
        board = self._board
        try:
            board.parts[self.rank] = local()
        except BaseException as error:
            board.error = error
        board.barrier.wait()
        if self.is_coordinator and board.error is None:
            sent = [encode_message(part) for part in board.parts]
            board.rounds.append(list(board.parts))
            board.bytes.append([len(message) for message in sent])
            received = [part if rank == 0 else decode_message(sent[rank]) for rank, part in enumerate(board.parts)]
            try:
                board.wholes = merge(received)
            except BaseException as error:
                board.error = error
        board.barrier.wait()
        if board.error is not None:
            raise board.error
        whole = board.wholes[self.rank]
        return whole if self.is_coordinator else decode_message(encode_message(whole))

    def reduce_scatter(self, phase: str, local: Callable[[], Any], merge: Callable[[list[Any]], list[Any]]) -> Any:
        return self._step(local, merge)

    def all_reduce(self, phase: str, local: Callable[[], Any], merge: Callable[[list[Any]], Any]) -> Any:
        return self._step(local, lambda parts: [merge(parts)] * len(parts))

    def locally(self, phase: str, local: Callable[[], Any]) -> Any:
        return local()

    def check(self) -> None:
        return None

    def follow(self, count: Callable[[], int], file: Callable[[], str]) -> None:
        return None


class Job:
    """Ranks that save together, again and again."""

    def __init__(self, ranks: int, path: Path, make: Callable[[], DefaultSavePlanner] = DefaultSavePlanner) -> None:
        self.kept: list[dict[object, Any]] = [{} for _ in range(ranks)]
        self.path = path
        self.make = make
        self.board = Board(ranks)
        self.planners: list[DefaultSavePlanner] = []
        self.make_writer: Callable[[str], holdfast.StorageWriter] = lambda path: NativeWriter(path, attempt=ATTEMPT)
        self.saves = 0

    def save(self, states: list[dict[str, Any]]) -> list[Metadata]:
        """What every rank gets; what the coordinator received is in ``board``."""
        self.board = board = Board(len(states))
        self.saves += 1
        results: list[Any] = [None] * len(states)
        self.planners = [self.make() for _ in states]

        def run(rank: int) -> None:
            ranks = ThreadRanks(rank, board, self.kept[rank])
            storage = self.make_writer(str(self.path / str(self.saves)))
            try:
                results[rank] = _save(states[rank], Saving(storage, self.planners[rank], ranks))  # type: ignore[arg-type]
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(len(states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def loaded(self) -> dict[Any, Any]:
        return holdfast.load(self.path / str(self.saves))

    def sent(self, number: int) -> list[str]:
        """The kind of what each rank sent in a round; "Again" for the name of a planning and digests."""
        names = [type(part).__name__ for part in self.board.rounds[number]]
        return names if number else [{"tuple": "Offer", "bytes": "Again"}.get(name, name) for name in names]

    @property
    def was_planned_again(self) -> bool:
        return set(self.sent(0)) != {"Again"}


def states(ranks: int = 3, **changes: Any) -> list[dict[str, Any]]:
    """What ranks have in common, and something of each; tied weights too."""
    made = []
    for rank in range(ranks):
        weight = torch.arange(6.0).view(2, 3)
        state = {
            "weight": weight,
            "tied": weight,
            "array": np.arange(3),
            "step": 7,
            "nested": {"list": [torch.ones(2)], 5: "five"},
            f"own.{rank}": torch.full((2,), float(rank)),
        }
        made.append({**state, **changes})
    return made


def same_layout(ranks: int = 3, **changes: Any) -> list[dict[str, Any]]:
    return [{key: leaf for key, leaf in state.items() if "own" not in key} for state in states(ranks, **changes)]
