"""transformers: a Trainer with ``HoldfastMixin`` trains, is killed in the middle of a save, and resumes."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
from client import CannotRun, assert_same, refusal, run_client, whole
from measuring import SAVES, Cost
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import holdfast
from holdfast import Steps, StopOn
from holdfast.integrations.transformers import HoldfastMixin

STEPS = 8
TOKENS = 16


class HoldfastTrainer(HoldfastMixin, Trainer):
    """What a user writes."""


def language_model(size: int = 32, layers: int = 2) -> LlamaForCausalLM:
    """The same small model on every rank, with dropout, so that it draws random numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """So many rows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (count, TOKENS), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


class Losses(TrainerCallback):
    """Notes what was logged at each step, and may do something at the end of one."""

    def __init__(self, then: Callable[[int], object] = int) -> None:
        self.by_step: dict[int, float] = {}
        self.then = then

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.by_step[state.global_step] = logs["loss"].hex()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.then(state.global_step)


def trainer_at(
    directory: str, kind: type[Trainer] = HoldfastTrainer, losses: Losses | None = None, **options: Any
) -> tuple[Trainer, Losses]:
    """A trainer of the small model that saves every second step, and the losses that it will note."""
    losses = losses or Losses()
    ours = {name: options.pop(name) for name in ("asynchronous", "options", "stop", "export") if name in options}
    each = 8 // int(os.environ["WORLD_SIZE"])
    model = options.pop("model", None) or language_model()
    settings: dict[str, Any] = {"save_steps": 2, "max_steps": STEPS, "per_device_train_batch_size": each, **options}
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    # 5 steps are an epoch: a run goes on in the middle of one.
    data = texts(40)
    return kind(model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[losses], **ours), losses


def note_of(directory: str) -> Path:
    """Where the losses of the unbroken run are."""
    return Path(directory, "losses.json")


def unbroken(directory: str) -> str:
    """Train without a break, and note the losses for later launches."""
    trainer, losses = trainer_at(os.path.join(directory, "unbroken"))
    trainer.train()
    assert sorted(losses.by_step) == list(range(1, STEPS + 1)), losses.by_step
    if trainer.args.process_index == 0:
        note_of(directory).write_text(json.dumps(losses.by_step))
        assert [step.step for step in Steps(trainer.args.output_dir).steps()] == [2, 4, 6, 8]
    return f"{STEPS} steps"


def killed(directory: str) -> str:
    """Have all ranks die while step 6 is written and not yet published."""
    written: list[object] = []

    def die(handle: holdfast.AsyncSave) -> None:
        if handle.phase == "writing" and handle not in written:
            written.append(handle)
        if len(written) == 3:  # called by the thread that is about to write
            os.kill(os.getpid(), signal.SIGKILL)

    trainer, _ = trainer_at(os.path.join(directory, "run"), options=holdfast.SaveOptions(progress=die))
    trainer.train()
    return "it is still alive"


def resumed(directory: str) -> str:
    """Resume what was killed; the losses are those of the unbroken run."""
    expected = json.loads(note_of(directory).read_text())
    trainer, losses = trainer_at(os.path.join(directory, "run"))
    torn = Path(trainer.args.output_dir, "step-6")
    trainer.train(resume_from_checkpoint=True)
    assert trainer.resumed.step == 4, trainer.resumed
    assert losses.by_step == {step: expected[str(step)] for step in range(5, STEPS + 1)}, (losses.by_step, expected)
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == list(range(1, STEPS + 1))
    assert holdfast.verify(torn).ok
    return "resumed from step 4, 4 losses bit-equal"


def resized(directory: str) -> str:
    """Resume on other ranks: weights and moments are those that were saved, and training goes on."""
    root = os.path.join(directory, "unbroken")
    kept = holdfast.read(f"{root}/step-8")
    trainer, losses = trainer_at(root, max_steps=STEPS + 2)
    before: list[int] = []

    class Compare(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            assert_same(whole(dict(objects["model"].state_dict())), dict(kept["model"]))
            assert_same(whole(objects["optimizer"].state_dict()["state"]), kept["optimizer"]["state"])
            before.append(state.global_step)

    trainer.add_callback(Compare())
    trainer.train(resume_from_checkpoint=True)
    assert before == [STEPS], before
    assert sorted(losses.by_step) == [STEPS + 1, STEPS + 2]
    made_on = {step.step: step.world_size for step in Steps(root).steps()}
    ranks = trainer.args.world_size
    assert made_on[STEPS] != ranks, made_on
    assert made_on[STEPS + 2] == ranks, made_on
    return f"a step of {made_on[STEPS]} ranks on {ranks}; generators {trainer.resumed.per_rank['rng']}"


def rotated(directory: str) -> str:
    """Keep the newest and the best: nothing else is left, and the best is what the trainer and the export have."""
    root, folder = os.path.join(directory, "rotated"), os.path.join(directory, "exported")
    seen: list[list[int]] = []
    losses = Losses(lambda _: seen.append([step.step for step in Steps(root).steps()]))
    trainer, _ = trainer_at(
        root,
        losses=losses,
        export=folder,
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        learning_rate=1.0,
        lr_scheduler_type="constant",
    )
    trainer.train()
    best = trainer.state.best_global_step
    left = {step.step for step in Steps(root).steps()}
    assert left == {best, STEPS}, (left, best)
    assert best < STEPS, "the best step is not to be the newest"
    # A step goes only when a newer one is published: there is always one, once there was one.
    assert all(steps for steps in seen[seen.index(next(filter(None, seen))) :]), seen
    kept = holdfast.read(f"{root}/step-{best}")["model"]
    assert_same(whole(dict(trainer.model.state_dict())), dict(kept))
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert_same(dict(loaded.state_dict()), {name: kept[name] for name in loaded.state_dict()})
    return f"steps {sorted(left)} are left, and step {best} is exported"


def stopped(directory: str) -> str:
    """A signal to one rank stops all of them at one step, which is saved though it is not due."""
    root = os.path.join(directory, "stopped")

    def signal_one(step: int) -> None:
        if step == 3 and trainer.args.process_index == trainer.args.world_size - 1:
            signal.raise_signal(signal.SIGUSR1)

    trainer, losses = trainer_at(
        root, losses=Losses(signal_one), save_steps=1000, max_steps=1000, stop=StopOn(signals=("SIGUSR1",))
    )
    trainer.train()
    last, latest = trainer.state.global_step, Steps(root).latest()
    assert latest is not None
    assert 3 <= last == latest.step < 1000, (last, latest)
    assert max(losses.by_step) == last
    return "one signal, and all ranks stop at one step"


def synchronous(directory: str) -> str:
    """The same run with saves that block has the same losses and the same steps."""
    root = os.path.join(directory, "synchronous")
    trainer, losses = trainer_at(root, asynchronous=False)
    trainer.train()
    assert losses.by_step == {int(step): loss for step, loss in json.loads(note_of(directory).read_text()).items()}
    assert [step.step for step in Steps(root).steps()] == [2, 4, 6, 8]
    ours, theirs = (holdfast.read(f"{directory}/{run}/step-8") for run in ("synchronous", "unbroken"))
    for name in ("model", "optimizer", "scheduler"):
        assert_same(whole(dict(ours[name])), whole(dict(theirs[name])), name)
    return "step 8 is equal, asynchronous or not"


def damaged(directory: str) -> str:
    """A newest step with a flipped bit is passed over, as a whole."""
    root = Path(directory, "unbroken")
    expected = json.loads(note_of(directory).read_text())
    trainer, losses = trainer_at(str(root))
    if trainer.args.process_index == 0:
        data = max(root.joinpath("step-8").iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    dist.barrier()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.resumed.step == 6, trainer.resumed
    assert [each.step for each in trainer.resumed.skipped] == [8], trainer.resumed
    assert losses.by_step == {step: expected[str(step)] for step in (7, 8)}, losses.by_step
    return "step 8 has a flipped bit: resumed from step 6"


def theirs(directory: str) -> str:
    """A checkpoint of the Trainer itself is refused with a word, and loaded where it is named."""
    root = os.path.join(directory, "theirs")
    trainer, expected = trainer_at(root, Trainer)
    trainer.train()
    ours, losses = trainer_at(root)
    said = refusal(ValueError, functools.partial(ours.train, resume_from_checkpoint=True))
    assert f"{root}/checkpoint-8" in said, said
    ours, losses = trainer_at(root)
    ours.train(resume_from_checkpoint=f"{root}/checkpoint-4")
    assert losses.by_step == {step: loss for step, loss in expected.by_step.items() if step > 4}
    assert [step.step for step in Steps(root).steps()] == [6, 8]
    return "checkpoint-4 of the Trainer is loaded where it is named, then steps 6 and 8 are saved"


def refused(directory: str) -> str:
    """What cannot be kept is refused when the trainer is made, all of it in one error."""
    for options in ({"save_only_model": True, "enable_jit_checkpoint": True}, {"save_on_each_node": True}):
        said = refusal(ValueError, functools.partial(trainer_at, directory, **options))
        assert all(name in said for name in options), said
    return "save_only_model, enable_jit_checkpoint and save_on_each_node"


def sharded(directory: str) -> str:
    """Under FSDP2, a step has the shards of all ranks."""
    try:
        trainer, losses = trainer_at(f"{directory}/sharded", fsdp="full_shard", fsdp_config={"version": 2})
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise CannotRun(f"needs an accelerator: {error}") from error
    if not trainer.accelerator.is_fsdp2:
        raise CannotRun("needs an accelerator: elsewhere accelerate does not shard a model of the Trainer")
    trainer.train()
    kept = holdfast.read(f"{directory}/sharded/step-{STEPS}")
    assert_same(whole(dict(trainer.model.state_dict())), dict(kept["model"]))
    again, more = trainer_at(f"{directory}/sharded", max_steps=STEPS + 2, fsdp="full_shard", fsdp_config={"version": 2})
    again.train(resume_from_checkpoint=True)
    assert sorted(more.by_step) == [STEPS + 1, STEPS + 2], (losses.by_step, more.by_step)
    return "a step of sharded models is saved, and resumed from"


def measure(directory: str, kind: type[Trainer], **options: bool) -> str:
    """What saves of 1 GB cost: a third of it is the model, the rest what AdamW knows of it."""
    cost = Cost(lambda: trainer.checkpoints.wait() if kind is HoldfastTrainer else None)

    class Measured(kind):  # type: ignore[misc, valid-type]
        def _save_checkpoint(self, *args: Any) -> None:
            with cost.save():
                super()._save_checkpoint(*args)

    model = language_model(1024, 8)
    assert 3.3e8 < sum(tensor.nbytes for tensor in model.parameters()) < 3.4e8
    trainer, _ = trainer_at(directory, Measured, model=model, save_steps=1, max_steps=SAVES, **options)
    trainer.train()
    name = "step" if kind is HoldfastTrainer else "checkpoint"
    return cost.told(os.path.join(directory, f"{name}-{SAVES}"))


ACTIONS = {
    "unbroken": unbroken,
    "killed": killed,
    "resumed": resumed,
    "resized": resized,
    "rotated": rotated,
    "stopped": stopped,
    "synchronous": synchronous,
    "damaged": damaged,
    "theirs": theirs,
    "refused": refused,
    "sharded": sharded,
    "measure-framework": functools.partial(measure, kind=Trainer),
    "measure-holdfast": functools.partial(measure, kind=HoldfastTrainer),
    "measure-holdfast-sync": functools.partial(measure, kind=HoldfastTrainer, asynchronous=False),
}


if __name__ == "__main__":
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    run_client(ACTIONS[sys.argv[2]])
