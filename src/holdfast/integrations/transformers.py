"""The Trainer of transformers, with one checkpoint for each step in place of its folders of files.

The Trainer decides when to save. A CheckpointManager does the rest; it is asked at every step, and told to save by
``force`` whenever the Trainer saves.

A step holds the model, optimizer, scheduler and gradient scaler, what the Trainer counts (the ``TrainerState`` of the
first rank), and the random generators of each rank. The Trainer finds its place in the data by those counts, so loaders
have no state here. Nothing of it is pickled. What cannot be kept so is refused when the Trainer is made.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import torch

from holdfast._io.folders import scratch_folder
from holdfast._loader import load
from holdfast._native.publish import format_at
from holdfast._saver import SaveOptions
from holdfast._state.per_rank import Rng
from holdfast._steps.manager import CheckpointManager
from holdfast._steps.policies import Best, Every, Keep, Latest
from holdfast._steps.resuming import Resumed
from holdfast._steps.stopping import StopOn
from holdfast.hf import ExportOptions, Mapping, export
from holdfast.integrations import default_options, guard_once, imported

if TYPE_CHECKING:
    from transformers import Trainer as Framework
else:
    Framework = object  # whatever Trainer comes after the mixin

_theirs = imported("transformers", "transformers.trainer")

logger = logging.getLogger("holdfast")

_NEVER = Every(steps=2**62)  # by itself: the Trainer says when
_STOP = StopOn()


class HoldfastMixin(Framework):
    """Steps that are Holdfast's, for a Trainer: ``class MyTrainer(HoldfastMixin, SFTTrainer)``. All else is its own.

    ``asynchronous``, ``options``, ``keep`` and ``stop`` are those of ``CheckpointManager``; metrics are what was logged
    at the step. Without ``keep``, the newest ``save_total_limit`` steps stay, and the best by
    ``metric_for_best_model``. A run that is asked to stop returns from ``train``. At the end of training, the model is
    written to the folder ``export`` as a Hugging Face folder. All other arguments are the Trainer's.
    From the call of ``train`` on, ``checkpoints`` is the manager of ``output_dir``; ``resumed`` says what was loaded.
    """

    checkpoints: CheckpointManager
    resumed: Resumed | None
    _prepared: torch.nn.Module | None
    _scratch = ""  # a folder that stands for a step, where the Trainer wants one

    def __init__(
        self,
        *args: Any,
        asynchronous: bool | Literal["process"] = True,
        options: SaveOptions | None = None,
        keep: Keep | Sequence[Keep] | None = None,
        stop: StopOn | None = _STOP,
        export: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        options = options or default_options(asynchronous, guard_once([self.optimizer]))
        if refused := _refused(self, options):
            raise ValueError(f"steps cannot be saved by Holdfast: {refused}")
        kept = _policies(self.args) if keep is None else keep
        self._open = partial(CheckpointManager, keep=kept, stop=stop, asynchronous=asynchronous, options=options)
        self._export = export

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """What the Trainer's ``train`` returns; all its steps are durable then.

        With ``resume_from_checkpoint=True``, it goes on from the newest step of ``output_dir`` that is whole; if there
        is none, it begins. A path is that of a step, or of a checkpoint that the Trainer itself has saved.
        """
        if args[:1] not in ((), (None,)) or kwargs.get("trial") is not None:
            raise ValueError("a search for hyperparameters needs the Trainer itself: its trials have no steps here")
        self._source, self._prepared, self.resumed, self._seen, self._is_stopped = "", None, None, 0, False
        with self._open(self.args.output_dir, save=_NEVER) as manager, scratch_folder() as scratch:
            self.checkpoints, self._scratch = manager, scratch
            begin = self._where_to_begin(resume_from_checkpoint)
            output = super().train(begin, *args, **kwargs)
        if self._export is not None and self._is_stopped:
            logger.warning("%s is not written: the run was stopped at step %d", self._export, self._seen)
        elif self._export is not None:
            self._write_export(self._export)
        return output

    def _where_to_begin(self, wanted: str | bool | None) -> str | None:
        """The folder that the Trainer is told to resume from: ours if a step is loaded, or one of its own."""
        if wanted is True:
            theirs = _theirs.get_last_checkpoint(self.args.output_dir) if os.path.isdir(self.args.output_dir) else None
            if theirs is not None and not self.checkpoints.found():
                raise ValueError(
                    f"{self.args.output_dir!r} has no step, but a checkpoint of the Trainer itself; to have the "
                    f"Trainer load it, and go on with steps, call train(resume_from_checkpoint={theirs!r})"
                )
        elif not wanted or format_at(wanted) is None:
            return wanted or None  # the Trainer loads it, or says what is wrong with it
        else:
            self._source = wanted
        _theirs.TrainerState().save_to_json(f"{self._scratch}/{_theirs.TRAINER_STATE_NAME}")  # until a step is known
        return self._scratch

    def _init_training_state(self, steps: int, per_epoch: int, epochs: int, begin: str | None, trial: object) -> Any:
        if begin == self._scratch:
            # Sooner than the Trainer would, because a step is loaded as a whole: if it is damaged, none of it counts.
            self._prepared, _ = super()._prepare_for_training(steps, None, None)
            begin = begin if self._load() else None
        return super()._init_training_state(steps, per_epoch, epochs, begin, trial)

    def _prepare_for_training(self, max_steps: int, train_dataloader: object, *begin: str | None) -> Any:
        if self._prepared is None:
            return super()._prepare_for_training(max_steps, train_dataloader, *begin)
        self.callback_handler.train_dataloader = train_dataloader
        return self._prepared, train_dataloader

    def _load(self) -> bool:
        """Load the step to go on with, and put what it counts where the Trainer looks; False if there is no step."""
        counts: dict[str, torch.Tensor] = {}
        target = {**self._state(), "trainer": counts}
        if self._source:
            self.resumed = Resumed(path=self._source, report=load(target, self._source))
        else:
            self.resumed = self.checkpoints.resume(target)
            self._source = self.resumed.path or ""
        if self._source:
            known = _theirs.TrainerState(**json.loads(counts["json"].numpy().tobytes()))
            known.save_to_json(f"{self._scratch}/{_theirs.TRAINER_STATE_NAME}")
        else:
            logger.warning("%r has no step to resume from: training begins", self.args.output_dir)
        return bool(self._source)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        if resume_from_checkpoint != self._scratch:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != self._scratch:
            super()._load_rng_state(checkpoint)
        elif self._source:  # once more, because finding the place in the data has drawn numbers
            load({"rng": Rng("fresh")}, self._source)

    def _load_best_model(self) -> None:
        self.checkpoints.wait()
        if format_at(self.state.best_model_checkpoint) is None:  # it is of the Trainer itself
            super()._load_best_model()
        else:
            load({"model": self.model}, self.state.best_model_checkpoint)

    def _state(self) -> dict[str, object]:
        scaler = getattr(self.accelerator, "scaler", None)
        # What ranks count and log is not the same on each; that of the first is kept.
        some = {"trainer": _Counts(self) if self.args.process_index == 0 else None, "scaler": scaler}
        state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.lr_scheduler, "rng": Rng("fresh")}
        return {**state, **{name: value for name, value in some.items() if value is not None}}

    def _save_checkpoint(self, model: object, trial: object) -> None:
        self.store_flos()
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = self.checkpoints.path(self.state.global_step)
        self._pass_on(force=True)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        step = self.state.global_step
        if step > self._seen:  # it is called at the end of an epoch too
            self._seen = step
            self._pass_on(force=False)
            self._is_stopped = self.checkpoints.should_stop(step)
            self.control.should_training_stop |= self._is_stopped

    def _pass_on(self, *, force: bool) -> None:
        """Tell the manager of the step, which saves it if ``force`` is set or the run is to stop."""
        step = self.state.global_step
        now = takewhile(lambda entry: entry.get("step") == step, reversed(self.state.log_history))
        metrics = {name: value for entry in now for name, value in entry.items() if isinstance(value, float)}
        guard_once([self.optimizer])
        self.checkpoints.save(step, self._state(), metrics=metrics, force=force)

    def _write_export(self, folder: str | os.PathLike[str]) -> None:
        model = self.accelerator.unwrap_model(self.model)
        mapping, beside = None, [self.processing_class] if self.processing_class else []
        if isinstance(model, _theirs.PreTrainedModel):
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            mapping = Mapping.from_transformers(model)
            beside += [config, model.generation_config] if model.can_generate() else [config]
        with scratch_folder() as assets:
            for each in beside:
                each.save_pretrained(assets)
            options = ExportOptions(replica_check=[name for name, _ in model.named_buffers()])  # each rank has its own
            export(model, folder, mapping=mapping, assets=assets, overwrite=True, options=options)


class _Counts:
    """What a Trainer counts and has logged, as it is when it is asked for: JSON, as numbers, because it may be long."""

    def __init__(self, trainer: HoldfastMixin) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, torch.Tensor]:
        trainer = self._trainer
        found: dict[str, list[object]] = {}
        for each in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(each, _theirs.ExportableState):
                found.setdefault(type(each).__name__, []).append(each.state())
        trainer.state.stateful_callbacks = {name: all_[0] if len(all_) == 1 else all_ for name, all_ in found.items()}
        text = json.dumps(dataclasses.asdict(trainer.state), sort_keys=True)
        return {"json": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def load_state_dict(self, state: object) -> None:
        """Do nothing: the Trainer reads it from a file."""


def _policies(args: Any) -> list[Keep]:
    """What the arguments of the Trainer say of the steps that stay."""
    limit, metric = args.save_total_limit or 0, args.metric_for_best_model
    keep: list[Keep] = [Latest(limit)] if limit > 0 else []
    if keep and metric is not None:
        name = f"eval_{metric.removeprefix('eval_')}"
        keep.append(Best(1, name, "max" if args.greater_is_better else "min", awaits=0))
    return keep


def _refused(trainer: HoldfastMixin, options: SaveOptions) -> str:
    """What the Trainer is asked to do that steps of Holdfast cannot do, and what to do instead."""
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    reasons = {
        "DeepSpeed keeps its state to itself; use FSDP2": trainer.is_deepspeed_enabled,
        "shards of FSDP1 are not kept; set fsdp_version=2": plugin is not None and plugin.fsdp_version != 2,
        "ranks of SageMaker and TPUs are not known; use torchrun": args.parallel_mode.value.startswith(("sage", "tpu")),
        "with options.stage 'overlap' callbacks may change what is saved; add prove=True": (
            options.stage == "overlap" and not options.prove
        ),
        "save_only_model leaves nothing to resume from; pass export= instead": args.save_only_model,
        "enable_jit_checkpoint stops ranks one by one; stop= stops all at one step": args.enable_jit_checkpoint,
        "steps are not pushed to a hub; set hub_strategy='end'": args.push_to_hub and args.hub_strategy.value != "end",
        "save_on_each_node is for files of each node; all nodes write one checkpoint": args.save_on_each_node,
    }
    return "; ".join(reason for reason, is_so in reasons.items() if is_so)
