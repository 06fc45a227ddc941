"""The steps that all ranks of a save or load take together.

A phase runs ``local`` on every rank and ``merge`` on the coordinator. Whatever fails, on whichever rank, is raised on
every rank as a CheckpointError: one of this library's own as it is, anything else wrapped, with the original as its
cause. Interrupts pass through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar

from holdfast.errors import CheckpointError

Part = TypeVar("Part")
Whole = TypeVar("Whole")


class Ranks(Protocol):
    """All ranks of one save or load, as one of them sees them; entered once, around all phases."""

    @property
    def rank(self) -> int:
        """The number of this one."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the one that merges."""
        ...

    @property
    def names(self) -> tuple[int, ...]:
        """The number of each in the whole job, as errors name them."""
        ...

    @property
    def deadline_s(self) -> float:
        """Seconds without progress after which a rank that others wait for is given up."""
        ...

    @property
    def kept(self) -> dict[object, Any]:
        """What this rank keeps for later operations of the same ranks under the same coordinator."""
        ...

    def __enter__(self) -> Ranks: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def scatter(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], list[Whole]]) -> Whole:
        """This rank's element of what ``merge`` makes of all parts."""
        ...

    def share(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], Whole]) -> Whole:
        """What ``merge`` makes of all parts, the same on every rank."""
        ...

    def alone(self, phase: str, local: Callable[[], Part]) -> Part:
        """What ``local`` returns, without a word to the others unless it fails; that is raised on every rank."""
        ...

    def again(self) -> None:
        """Go on after a failure that every rank has raised, as if it had not been; all ranks do so, or none."""
        ...

    def check(self) -> None:
        """Raise what another rank has failed with, if one has; cheap enough for every round of a loop, any thread."""
        ...

    def progress(self, bytes_done: int) -> None:
        """Show the others that the work of this phase goes on; any thread."""
        ...

    def follow(self, count: Callable[[], int], file: Callable[[], str]) -> None:
        """Ask now and then, in another thread, how far the work is, and at which file, and show that to the others."""
        ...


class SoloRanks:
    """One process that is all the ranks there are, or acts as if it were: then under the number that it has."""

    size = 1
    deadline_s = math.inf

    def __init__(self, *, rank: int = 0, is_coordinator: bool = True) -> None:
        self.rank = rank
        self.names = (rank,)
        self.is_coordinator = is_coordinator
        self.kept: dict[object, Any] = {}

    def __enter__(self) -> SoloRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def scatter(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], list[Whole]]) -> Whole:
        """The one element of what ``merge`` makes of the one part."""
        with _naming(phase):
            (whole,) = merge([local()])
            return whole

    def share(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], Whole]) -> Whole:
        """What ``merge`` makes of the one part."""
        with _naming(phase):
            return merge([local()])

    def alone(self, phase: str, local: Callable[[], Part]) -> Part:
        """What ``local`` returns."""
        with _naming(phase):
            return local()

    def again(self) -> None:
        """Nothing to do: what failed is over."""

    def check(self) -> None:
        """Nothing to do: there is nobody else who could have failed."""

    def progress(self, bytes_done: int) -> None:
        """Nothing to do: nobody waits."""

    def follow(self, count: Callable[[], int], file: Callable[[], str]) -> None:
        """Nothing to do: nobody waits."""


@contextmanager
def _naming(phase: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        message = str(error).partition("\n")[0]
        raise CheckpointError(f"{phase} failed: {type(error).__name__}: {message}", {0: error}) from error
