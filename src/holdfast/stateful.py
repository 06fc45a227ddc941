"""The protocol of objects that carry their own state."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Stateful", "StatefulT"]


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as a dict and takes it back: modules, optimizers, schedulers, loaders."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as a dict whose tensors alias the object's own."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take over ``state_dict``."""
        ...


StatefulT = TypeVar("StatefulT", bound=Stateful)
"""Any type of such objects, for annotations."""
