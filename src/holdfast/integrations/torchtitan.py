"""torchtitan: a checkpoint manager for ``Trainer.Config.checkpoint``, in the place of torchtitan's own.

torchtitan's loop calls it at every step, so a CheckpointManager decides all: when to save, what stays, when to stop.
Keys are those of torchtitan's own checkpoints, with two differences. "rng" is added: the random generators of each
rank. "dataloader" has the state of the loader of each rank as plain values, where torchtitan has a pickle of it.

The last step is saved whole, like every other one: a run can go on from it. The model alone is exported beside it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch

from holdfast import hf
from holdfast._io.urls import is_store_url
from holdfast._loader import LoadOptions, LoadReport, load
from holdfast._native.publish import format_at
from holdfast._saver import SaveOptions
from holdfast._state.per_rank import PerRank, Rng
from holdfast._steps.listing import Steps
from holdfast._steps.manager import CheckpointManager
from holdfast._steps.policies import Every, Keep, Latest
from holdfast._steps.stopping import StopOn
from holdfast.errors import MismatchError, UnsafeError
from holdfast.integrations import default_options, guard_once, imported
from holdfast.integrations.torchtitan_state import PlainLoader, WhenSaved, has_plain_state

__all__ = ["HoldfastCheckpoints"]

logger = logging.getLogger("holdfast")

_titan = imported("torchtitan", "torchtitan.components.checkpointer")
_types: Any = imported("torchtitan", "torchtitan.config").TORCH_DTYPE_MAP
_filesystem: Any = imported("torchtitan", "torchtitan.tools.filesystem")
tyro = imported("torchtitan", "tyro")
_Base: Any = _titan.BaseCheckpointManager
_BaseConfig: Any = _Base.Config
MODEL, DATALOADER, RNG = str(_titan.MODEL), str(_titan.DATALOADER), "rng"


class HoldfastCheckpoints(_Base):
    """The checkpoints of a torchtitan run: native ones, in the folder that torchtitan would use."""

    @dataclass(kw_only=True, slots=True)
    class Config(_BaseConfig):
        """Options of torchtitan, and ours.

        Attributes:
            last_save_model_only: as torchtitan has it, only together with ``last_save_in_hf``.
            asynchronous: save in the background, in a thread; "process" has another process write.
            export: at the end, write the model as a Hugging Face folder there. ``last_save_in_hf`` alone does so too,
                in ``hf`` in the folder of the checkpoints.
            allow_pickle: let torchtitan unpickle the state of the data loader in a checkpoint of its own.
            keep: policies, in the place of ``keep_latest_k``.
            stop: what the run stops for; None: nothing.
            options: the options of every save. None: a state on the CPU is written from where it is until the
                optimizer's next step, one on an accelerator is copied.
        """

        last_save_model_only: bool = False
        asynchronous: bool | Literal["process"] = True
        export: str | None = None
        allow_pickle: bool = False
        keep: Annotated[tuple[Keep, ...] | None, tyro.conf.Suppress] = None
        stop: Annotated[StopOn | None, tyro.conf.Suppress] = field(default_factory=StopOn)
        options: Annotated[SaveOptions | None, tyro.conf.Suppress] = None

        def __post_init__(self) -> None:
            if self.last_save_model_only and not self.last_save_in_hf:
                raise ValueError(
                    "last_save_model_only=True would leave a last step that no run can go on from; set it to False, "
                    "and export to a path if you want the model alone"
                )
            self.last_save_model_only = self.last_save_in_hf
            _BaseConfig.__post_init__(self)

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self._config, self._adapter = config, sd_adapter
        self._options = config.options or default_options(config.asynchronous, guard_once(optimizers))
        self.folder = config.folder if is_store_url(config.folder) else _filesystem.join(base_folder, config.folder)
        self._export_path = (
            config.export or os.path.join(self.folder, "hf") if config.last_save_in_hf else config.export
        )
        if self._export_path and sd_adapter is None:
            raise ValueError("there is nothing that knows the names of this model in Hugging Face files: no sd_adapter")
        if RNG in states:
            raise ValueError(f"{RNG!r} is the name of the random generators; give that state another one")
        self.states = states
        states.update({MODEL: _titan.ModelWrapper(model_parts), _titan.OPTIMIZER: optimizers})
        states.update({DATALOADER: dataloader, _titan.LR_SCHEDULER: lr_schedulers})
        if unknown := set(config.exclude_from_loading) - {*self.states, RNG}:
            raise ValueError(f"exclude_from_loading names what there is not: {', '.join(sorted(unknown))}")
        newest = (Latest(config.keep_latest_k),) if config.keep_latest_k else ()
        self._steps, self._run = Steps(self.folder), None
        if not config.load_only:  # then the run may be another one's, who has it
            self._run = CheckpointManager(
                self.folder,
                save=Every(steps=config.interval, at=(1,) if config.enable_first_step_checkpoint else ()),
                keep=newest if config.keep is None else config.keep,
                stop=config.stop,
                asynchronous=config.asynchronous,
                options=self._options,
            )

    @property
    def save_future(self) -> Future[Any] | None:
        """The handle of the save in the background."""
        return None if self._run is None else self._run.under_way

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if the step is due. SystemExit, with the code 0, where the run was asked to stop and has saved."""
        if self._run is None:
            return False
        is_saved = self._run.save(curr_step, WhenSaved(self._state), force=last_step)
        if last_step and curr_step > 0 and self._export_path:
            logger.info("the model is exported to %r", self._export_path)
            assets = self._adapter.hf_assets_path
            hf.export(
                self._adapter.to_hf(self.states[MODEL].state_dict()),
                self._export_path,
                dtype=_types[self._config.export_dtype],
                assets=assets if assets and os.path.isdir(assets) else None,
                overwrite=True,
            )
        if self._run.should_stop(curr_step):
            logger.warning("the run was asked to stop: it ends after step %d, which is saved", curr_step)
            raise SystemExit(0)
        return is_saved

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load ``step``, or the newest one, or what the run begins with; whether there was anything."""
        if step == -1 and self._run is None:
            newest = self._steps.latest()
            step = -1 if newest is None else newest.step
            if newest is None:
                return self._begin({}) is not None
        if step != -1:
            self._fill(self._steps.path(step), model_only=step == 0)
            return True
        assert self._run is not None
        newest, others = self._run.latest(), self._steps_of_torchtitan()
        if newest is not None and others and others[-1] > newest.step:
            raise MismatchError(
                f"{self.folder!r} has step {newest.step} of this manager, and the newer step {others[-1]} of "
                "torchtitan's own; set load_step to the one to go on from, or move the other away"
            )
        state = self._state(loads=True, model_only=newest is not None and newest.step == 0)
        resumed = self._run.resume(state, self._begin)
        if resumed.step is not None:
            self.states[MODEL].load_state_dict(state)
        return resumed.report is not None

    def _begin(self, _: object) -> LoadReport | None:
        """Load what a run without steps of its own begins with: a step of torchtitan's own, or the initial path."""
        config = self._config
        if others := self._steps_of_torchtitan():
            return self._fill(self._steps.path(others[-1]), model_only=others[-1] == 0)
        path = config.initial_load_path
        if config.initial_load_in_hf:
            path = path or (self._adapter and self._adapter.hf_assets_path)
            if not path or self._adapter is None:
                raise ValueError("initial_load_in_hf needs an sd_adapter, and initial_load_path or hf_assets_path")
            return self._fill_from_hf(path)
        return self._fill(path, model_only=config.initial_load_model_only) if path else None

    def _fill(self, path: str, *, model_only: bool) -> LoadReport:
        """Load all states, or the model, from the checkpoint at ``path``, ours or torchtitan's."""
        is_titan = format_at(path) == "torch"
        state = self._state(loads=True, model_only=model_only, is_titan=is_titan)
        report = load(state, path, options=LoadOptions(deadline_s=self._options.deadline_s))
        if is_titan and not model_only:
            logger.warning("%r is torchtitan's own: it has no state of the random generators", path)
        self.states[MODEL].load_state_dict(state)
        return report

    def _fill_from_hf(self, path: str) -> LoadReport:
        model = self.states[MODEL]
        outside = self._adapter.to_hf(model.state_dict())
        if self._config.initial_load_in_hf_quantized:
            report = load(outside, storage_reader=self._adapter.get_hf_storage_reader(path, True))
        else:
            report = load(outside, path)
        model.load_state_dict(self._adapter.from_hf(outside))
        return report

    def _state(self, *, loads: bool = False, model_only: bool = False, is_titan: bool = False) -> dict[str, Any]:
        """What is saved, or loaded into; with the names of ``is_titan``, torchtitan's own checkpoints."""
        excluded = {MODEL, *(self._config.exclude_from_loading if loads else ())}
        state = dict(self.states[MODEL].state_dict())
        if model_only:
            return state
        state.update({name: part for name, part in self.states.items() if name not in excluded and part is not None})
        loader = state.get(DATALOADER)
        if is_titan:
            if has_plain_state(loader) and not self._config.allow_pickle:
                raise UnsafeError(
                    "the state of the data loader in torchtitan's own checkpoint is a pickle, which runs code; pass "
                    "allow_pickle if you trust it, or exclude 'dataloader' from loading to begin the data anew"
                )
            return state
        if loader is not None:
            plain = PlainLoader(loader) if has_plain_state(loader) else None
            state[DATALOADER] = PerRank(loader) if plain is None else PerRank(plain, plain.own)
        return state if RNG in excluded else {**state, RNG: Rng("fresh")}

    def _steps_of_torchtitan(self) -> list[int]:
        """The steps in torch's format, ascending. Those in an object store only fsspec would find."""
        if is_store_url(self.folder) or not os.path.isdir(self.folder):
            return []
        names = (re.fullmatch(r"step-(\d{1,17})", name) for name in os.listdir(self.folder))
        numbers = sorted(int(name[1]) for name in names if name)
        return [number for number in numbers if format_at(self._steps.path(number)) == "torch"]

    def _maybe_wait_for_staging(self) -> None:
        """Return when an optimizer may change the state: with ``stage="overlap"``, it is copied until then."""
        if self._run is not None and (handle := self._run.under_way) is not None:
            handle.fence()

    def _wait_for_saving(self) -> None:
        if self._run is not None:
            self._run.wait()

    def _close(self) -> None:
        # torchtitan closes while it handles what ended the run. That was a crash then, which a manager has to know.
        if (run := getattr(self, "_run", None)) is not None:
            run.__exit__(*sys.exc_info())
