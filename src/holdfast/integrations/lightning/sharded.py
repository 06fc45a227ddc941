"""Lightning's strategies for sharded models, FSDP and ModelParallel, of its Trainer and of Fabric: native checkpoints.

They do what Lightning's own do, except that all ranks write one checkpoint with one commit, where Lightning writes
torch's format and then a pickle beside it. A ``HoldfastIO`` says how: ``plugins=[HoldfastIO(asynchronous=True)]``.
Of what is not sharded, rank 0's is saved, as Lightning does it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from holdfast._checkpoint import open as open_checkpoint
from holdfast._loader import read
from holdfast._state.nested import is_stateful
from holdfast._state.per_rank import PerRank
from holdfast._torch_classes.torchs import state_dict as _states
from holdfast._values.shown import few
from holdfast.errors import InvalidStateError, MismatchError
from holdfast.integrations import imported
from holdfast.integrations.lightning.saves import HoldfastIO, State, check_no_options, is_lightnings_own

_trainers: Any = imported("lightning", "lightning.pytorch.strategies")
_fabrics: Any = imported("lightning", "lightning.fabric.strategies")

__all__ = ["FSDPStrategy", "FabricFSDPStrategy", "FabricModelParallelStrategy", "ModelParallelStrategy"]

Optimizers = list[torch.optim.Optimizer]
_PARTS = "state_dict", "optimizer_states"


class _Sharded:
    """Beside a strategy of Lightning: each rank saves and loads its part of a model and its optimizers."""

    broadcast: Callable[[Any], Any]
    global_rank: int
    _checkpoint_io: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("state_dict_type") == "full" or kwargs.get("save_distributed_checkpoint") is False:
            raise ValueError("a sharded checkpoint is loaded by any number of ranks, so none is gathered on rank 0")
        super().__init__(*args, **kwargs)

    @property
    def checkpoint_io(self) -> HoldfastIO:
        if self._checkpoint_io is None:
            self.checkpoint_io = HoldfastIO()
        io: HoldfastIO = self._checkpoint_io
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: object) -> None:
        if not isinstance(io, HoldfastIO):
            raise TypeError(f"{type(self).__name__} takes a HoldfastIO, not a {type(io).__name__}")
        io.is_sharded = True
        self._checkpoint_io = io

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self.checkpoint_io.teardown()

    def _save(self, state: State, models: dict[str, Any], sharded: Collection[str], path: Any) -> None:
        """Save ``state``: what is ``sharded`` from every rank, all else from rank 0. ``models`` know their buffers."""
        own = {
            key: value
            for key, value in state.items()
            if self.global_rank == 0 or key in sharded or isinstance(value, PerRank)
        }
        options = self.checkpoint_io.options_for(state)
        if options.replica_check == "sample":  # buffers may differ, as running statistics do
            buffers = [f"{key}.{name}" for key, model in models.items() for name, _ in model.named_buffers()]
            options = replace(options, replica_check=buffers) if buffers else options
        self.checkpoint_io.save(own, os.fspath(self.broadcast(path)), options=options, sharded=list(sharded))

    def _load(self, state: State, models: Collection[str], path: str, strict: bool) -> State:
        """Load into ``state``, in place; returns all else that the checkpoint has, without what is sharded."""
        io = self.checkpoint_io
        report = io.load(state, path, strict=strict)
        if strict and (left := [key for key in report.unexpected if key.partition(".")[0] in models]):
            raise MismatchError(f"{path!r} has {few(left, len(left))}, which the model does not have; or strict=False")
        with open_checkpoint(path) as checkpoint:
            named = checkpoint.user_metadata.get("sharded")
        known = {*state, *map(str, named if isinstance(named, list) else _PARTS)}
        others = [key for key in report.unexpected if key.partition(".")[0] not in known]
        return read(path, others, options=replace(io.load_options, mapping=None))

    def _is_lightnings(self, path: str) -> bool:
        return is_lightnings_own(path, allow_pickle=self.checkpoint_io.load_options.allow_pickle)


def _put_back(model: Any, weights: State, optimizers: Optimizers, states: list[State], strict: bool) -> None:
    """Have ``model`` and its ``optimizers`` take what was loaded."""
    _states.set_model_state_dict(model, weights, options=_states.StateDictOptions(strict=strict))
    for optimizer, state in zip(optimizers, states, strict=True):
        _states.set_optimizer_state_dict(model, optimizer, state)


class _OfTrainer(_Sharded):
    """For the Trainer, whose checkpoint is a dict of states."""

    model: Any
    optimizers: Optimizers
    lightning_module: Any

    def lightning_module_state_dict(self) -> State:
        return _states.get_model_state_dict(self.model)  # on its device: the save copies it

    def optimizer_state(self, optimizer: Any) -> State:
        return _states.get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: State, filepath: Any, storage_options: object = None) -> None:
        check_no_options(storage_options)
        self.checkpoint_io.warn_of_ranks(checkpoint)
        self._save(checkpoint, {_PARTS[0]: self.model}, _PARTS, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> State:
        path = os.fspath(self.broadcast(checkpoint_path))
        if self._is_lightnings(path):
            return super().load_checkpoint(path, bool(weights_only))  # type: ignore[misc, no-any-return]
        strict = self.lightning_module.strict_loading
        weights = _states.get_model_state_dict(self.model)
        states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        state = {"state_dict": weights, **({"optimizer_states": states} if states else {})}
        rest = self._load(state, _PARTS[:1], path, strict)
        _put_back(self.model, weights, self.optimizers, states, strict)
        return rest


class _OfFabric(_Sharded):
    """For Fabric, whose checkpoint is a dict of objects."""

    def save_checkpoint(self, path: Any, state: State, storage_options: object = None, filter: object = None) -> None:
        check_no_options(storage_options)
        if filter is not None:
            raise NotImplementedError("a sharded checkpoint cannot be filtered; leave things out of the state")
        models, optimizers = _objects_in(state)
        converted: State = {key: _states.get_model_state_dict(model) for key, model in models.items()}
        converted |= {
            key: _states.get_optimizer_state_dict(_owner(models, each), each) for key, each in optimizers.items()
        }
        self._save({**state, **converted}, models, [*models, *optimizers], path)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> State:
        path = os.fspath(self.broadcast(path))
        if not isinstance(state, dict) or not state or self._is_lightnings(path):
            return super().load_checkpoint(path, state, strict, bool(weights_only))  # type: ignore[misc, no-any-return]
        models, optimizers = _objects_in(state)
        target: State = {key: _states.get_model_state_dict(model) for key, model in models.items()}
        owners = {key: _owner(models, optimizer) for key, optimizer in optimizers.items()}
        target |= {key: _states.get_optimizer_state_dict(owners[key], each) for key, each in optimizers.items()}
        ranks_own = {key: value for key, value in state.items() if isinstance(value, PerRank)}
        rest = self._load(target | ranks_own, [*models], path, strict)
        for key, model in models.items():
            mine = [name for name, owner in owners.items() if owner is model]
            _put_back(model, target[key], [optimizers[name] for name in mine], [target[name] for name in mine], strict)
        asked = state.keys() - target.keys() - ranks_own.keys()
        if strict and (missing := sorted(asked - rest.keys())):
            raise MismatchError(f"{path!r} does not have {few(missing, len(missing))}; or strict=False")
        for key in asked & rest.keys():
            if is_stateful(state[key]):
                state[key].load_state_dict(rest.pop(key))
            else:
                state[key] = rest.pop(key)
        return rest


def _objects_in(state: State) -> tuple[dict[str, torch.nn.Module], dict[str, torch.optim.Optimizer]]:
    models = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module)}
    return models, {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}


def _owner(models: dict[str, torch.nn.Module], optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """The model that ``optimizer`` trains."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models.values():
        if trained <= {id(parameter) for parameter in model.parameters()}:
            return model
    raise InvalidStateError("an optimizer is in the state, and the model that it trains is not; put both there")


class FSDPStrategy(_OfTrainer, _trainers.FSDPStrategy):
    """Lightning's FSDPStrategy for the Trainer."""


class ModelParallelStrategy(_OfTrainer, _trainers.ModelParallelStrategy):
    """Lightning's ModelParallelStrategy for the Trainer."""


class FabricFSDPStrategy(_OfFabric, _fabrics.FSDPStrategy):
    """Lightning's FSDPStrategy for Fabric."""


class FabricModelParallelStrategy(_OfFabric, _fabrics.ModelParallelStrategy):
    """Lightning's ModelParallelStrategy for Fabric."""
