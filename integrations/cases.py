"""What ``run.py`` runs: for each framework the cases that its users need, each one or more launches of a script."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One run of a script on some ranks. ``is_killed``: the script kills its own ranks by SIGKILL, and has to.

    ``starts_ranks``: the script starts its ranks itself, so torchrun does not.
    """

    action: str = "all"
    ranks: int = 2
    is_killed: bool = False
    starts_ranks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Launches of one script that together show one thing."""

    framework: str
    name: str
    script: str
    launches: tuple[Launch, ...] = (Launch(),)


Launches = tuple[Launch, ...]


def cases(framework: str, rows: Iterable[tuple[str, Launches]]) -> tuple[Case, ...]:
    """The cases of the adapter for ``framework``, by name."""
    script = f"{framework}_adapter.py"
    return tuple(Case(framework=framework, name=name, script=script, launches=launches) for name, launches in rows)


def on(ranks: int, *actions: str) -> Launches:
    """A launch for each of the ``actions``; one that has "killed" in its name is."""
    return tuple(Launch(action=action, ranks=ranks, is_killed="killed" in action) for action in actions)


def crash(ranks: int, mode: str = "") -> Launches:
    """A run that is not disturbed; one that is killed in the middle of a save; and that one resumed."""
    return on(ranks, "unbroken", f"killed{mode}", f"resumed{mode}")


def lightning_crash(ranks: int, start: str) -> Launches:
    """The same of Lightning, whose actions begin with what saves and how."""
    return on(ranks, *(f"{start}/{stage}" for stage in ("whole", "killed", "resumed")))


ACCELERATE = (
    ("killed in a save, resumed", crash(2)),
    ("killed in a save, resumed", crash(4)),
    ("more ranks", on(2, "unbroken") + on(4, "resized")),
    ("fewer ranks", on(4, "unbroken") + on(2, "resized")),
    ("save_state, asynchronous or not", on(2, "saved")),
    ("save_state, asynchronous or not", on(4, "saved")),
    ("rotation, export", on(2, "rotated")),
    ("rotation, export", on(4, "rotated")),
    ("stopped by a signal", on(2, "stopped")),
    ("FSDP2, on 2 ranks and on 4", on(2, "sharded") + on(4, "sharded")),
    ("a checkpoint of its own", on(2, "theirs")),
    ("what is refused", on(2, "refused")),
)

LIGHTNING = (
    ("one device: killed in a save", lightning_crash(1, "ddp/sync")),
    ("DDP: killed in a save", lightning_crash(2, "ddp/sync")),
    ("DDP: killed in an asynchronous save", lightning_crash(4, "ddp/async")),
    ("ModelParallel: killed in a save", lightning_crash(4, "sharded/sync")),
    ("ModelParallel: killed, asynchronous", lightning_crash(2, "sharded/async")),
    ("ModelParallel: killed, another process writes", lightning_crash(2, "sharded/process")),
    ("Fabric, ModelParallel: killed, asynchronous", lightning_crash(2, "fabric/async")),
    ("DDP: on more ranks", on(2, "ddp/sync/killed") + on(4, "ddp/async/resized")),
    ("ModelParallel: on fewer ranks", on(4, "sharded/async/killed") + on(2, "sharded/async/resized")),
    ("ModelParallel: on more ranks", on(2, "sharded/sync/killed") + on(4, "sharded/sync/resized")),
    ("Fabric, ModelParallel: on fewer ranks", on(4, "fabric/sync/killed") + on(2, "fabric/sync/resized")),
    ("DDP: rotation during a save", on(2, "ddp/async/rotation")),
    ("ModelParallel: rotation during a save", on(4, "sharded/async/rotation")),
    ("one device: a save fails", on(1, "ddp/async/failed")),
    ("DDP: save_last='link'", on(2, "ddp/sync/linked")),
    ("DDP: a checkpoint of Lightning's own", on(2, "ddp/sync/own")),
    ("ModelParallel: a checkpoint of Lightning's own", on(2, "sharded/sync/own")),
    ("DDP: export at the end", on(2, "ddp/async/exported")),
    ("ModelParallel: export at the end", on(4, "sharded/async/exported")),
    ("FSDP", on(2, "fsdp/sync/whole")),
)

RAY = (
    ("killed in a save, restarted; more workers", (Launch(action="killed", starts_ranks=True),)),
    ("not asynchronous, export; a save fails", (Launch(action="others", starts_ranks=True),)),
)

TORCHTITAN = (
    ("killed in a save, resumed", crash(2)),
    ("killed in a save, resumed", crash(4)),
    ("the same, in the background", crash(2, "-async")),
    ("the same, another process writes", crash(2, "-process")),
    ("in an object store", on(1, "in-store")),
    ("other ranks", on(2, "saved") + on(4, "moved")),
    ("other ranks, same data ranks", on(2, "saved") + on(4, "moved-tensor-parallel")),
    ("rotation beside saves", on(2, "rotated")),
    ("checkpoints of its own", on(2, "their-own")),
    ("stop by a signal", on(2, "stopped")),
    ("export, and a run from it", on(2, "exported")),
)

TRANSFORMERS = (
    ("Trainer, killed in a save, resumed", crash(2)),
    ("Trainer, killed in a save, resumed", crash(4)),
    ("Trainer, more ranks", on(2, "unbroken") + on(4, "resized")),
    ("Trainer, fewer ranks", on(4, "unbroken") + on(2, "resized")),
    ("Trainer, asynchronous or not", on(2, "unbroken", "synchronous")),
    ("Trainer, rotation, best step, export", on(2, "rotated")),
    ("Trainer, rotation, best step, export", on(4, "rotated")),
    ("Trainer, stopped by a signal", on(2, "stopped")),
    ("Trainer, stopped by a signal", on(4, "stopped")),
    ("Trainer, a damaged step", on(2, "unbroken", "damaged")),
    ("Trainer, a checkpoint of its own", on(2, "theirs")),
    ("Trainer, what is refused", on(2, "refused")),
    ("Trainer, FSDP2", on(2, "sharded")),
)

CASES = (
    Case(framework="accelerate", name="FSDP2, under use_in_torch()", script="accelerate_fsdp2.py"),
    *cases("accelerate", ACCELERATE),
    Case(framework="lightning", name="Fabric, under use_in_torch()", script="fabric_model_parallel.py"),
    *cases("lightning", LIGHTNING),
    *cases("ray", RAY),
    Case(framework="torchtitan", name="its manager, under use_in_torch()", script="torchtitan_manager.py"),
    *cases("torchtitan", TORCHTITAN),
    *cases("transformers", TRANSFORMERS),
)
