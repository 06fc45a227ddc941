"""When a step is saved, and which steps stay: values that the user chooses, and what follows from them. No I/O.

Invariant: the newest step, pinned steps and steps that a reader holds are kept, whatever the policies say. A step that
cannot be read does not count for a policy: it never takes the place of a step that can be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast._steps.listing import Mode, Step, ranked


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """When to save: at multiples of ``steps``, ``seconds`` after the save before, and ``at`` these steps.

    They combine: a step is due if any of them says so. Step 0 is due only where ``at`` names it.
    """

    steps: int | None = None
    seconds: float | None = None
    at: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.steps is not None:
            _check_count(self.steps, "Every(steps=...)")
        if self.seconds is not None and not (is_number(self.seconds) and self.seconds > 0):
            raise ValueError(f"Every(seconds=...) takes a positive number of seconds, not {self.seconds!r}")
        if not isinstance(self.at, Collection) or not all(type(step) is int and step >= 0 for step in self.at):
            raise ValueError(f"Every(at=...) takes step numbers, as in at=(1, 10, 100), not {self.at!r}")
        if self.steps is None and self.seconds is None and not self.at:
            raise ValueError("Every() would never save; pass steps=, seconds= or at=")

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is due by its number; ``seconds`` do not count here."""
        return (self.steps is not None and step > 0 and step % self.steps == 0) or step in self.at


@dataclass(frozen=True, slots=True)
class Latest:
    """Keep the newest ``count`` steps."""

    count: int

    def __post_init__(self) -> None:
        _check_count(self.count, "Latest(...)")


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Keep the steps that are multiples of ``steps``, for ever."""

    steps: int

    def __post_init__(self) -> None:
        _check_count(self.steps, "EverySteps(...)")


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``count`` steps with the best ``metric``; NaN is worst, and ties go to the later step.

    A metric may be reported long after the save: the newest ``awaits`` steps that do not have it yet are kept too.
    """

    count: int
    metric: str
    mode: Mode = "min"
    awaits: int = 4

    def __post_init__(self) -> None:
        _check_count(self.count, "Best(...)")
        _check_count(self.awaits, "Best(awaits=...)", least=0)
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"Best(...) takes the name of a metric, as in Best(2, 'val_loss'), not {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Best(mode=...) is 'min' or 'max', whichever metric is better, not {self.mode!r}")


Keep = Latest | EverySteps | Best


def _check_count(count: object, place: str, *, least: int = 1) -> None:
    if type(count) is not int or count < least:
        raise ValueError(f"{place} takes a whole number of at least {least}, not {count!r}")


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite number, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def checked_policies(keep: Keep | Sequence[Keep]) -> tuple[Keep, ...]:
    """``keep`` as a tuple; ValueError for something else than a policy, and for two policies of one kind."""
    policies = tuple(keep) if isinstance(keep, (list, tuple)) else (keep,)
    seen: set[object] = set()
    for policy in policies:
        if not isinstance(policy, (Latest, EverySteps, Best)):
            raise ValueError(f"keep takes Latest(...), EverySteps(...) and Best(...), not {policy!r}")
        name = policy.metric if isinstance(policy, Best) else policy if isinstance(policy, EverySteps) else Latest
        if name in seen:
            raise ValueError(f"keep has two policies of one kind, the second is {policy!r}; leave one of them out")
        seen.add(name)
    return policies


def kept(steps: Sequence[Step], policies: Collection[Keep], *, newest: int, held: Collection[int] = ()) -> set[int]:
    """The numbers of the ``steps`` that stay after ``newest`` was published. Without policies, all of them.

    These always stay: ``newest``; pinned steps; those ``held`` by readers; those whose metric is awaited; those that
    cannot be read; and steps after ``newest``, which belong to another run that this one did not resume from.
    """
    ours = sorted((step for step in steps if not step.problem and step.step <= newest), key=lambda step: step.step)
    numbers = {step.step for step in steps}
    safe = {*held, newest, *(step.step for step in steps if step.pinned)}
    chosen = numbers - {step.step for step in ours} if policies else numbers
    for policy in policies:
        if isinstance(policy, Latest):
            found = ours[-policy.count :]
        elif isinstance(policy, EverySteps):
            found = [step for step in ours if step.step % policy.steps == 0]
        else:
            awaited = [step for step in ours if policy.metric not in step.metrics]
            found = ranked(ours, policy.metric, policy.mode)[: policy.count]
            found += awaited[max(0, len(awaited) - policy.awaits) :]
        chosen |= {step.step for step in found}
    return chosen | (numbers & safe)
