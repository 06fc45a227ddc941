"""torchtitan's Trainer with ``holdfast.integrations.torchtitan``: what one launch of a case does.

The Trainer is torchtitan's own, with its llama3, FSDP2, optimizers, schedulers, data loader and loop. torchtitan knows
no CPU among its devices. So what it asks an accelerator for, its name and its memory, is answered here; attention is
torch's own, because torchtitan's has no backward pass on CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from client import CannotRun, assert_same, run_client, whole
from measuring import SAVES, Cost
from torch.distributed.fsdp import FSDPModule

import holdfast
from holdfast import MismatchError, StopOn, UnsafeError, events


class _Cpu:
    """The device module of the CPU, with the answers that torchtitan wants of accelerators."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 64

    def set_device(self, device: object) -> None: ...

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 34, name="CPU")

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None: ...

    def empty_cache(self) -> None: ...


if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 calls it after the first step; torch 2.13 does not have it
    dist.set_timeout = lambda timeout, group=None: None
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda name: _Cpu()

STEPS, EVERY, KILLED_AT = 10, 3, 6
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Losses = dict[int, str]


def _words() -> Any:
    import datasets

    rows = torch.randint(0, 50, (200, 150), generator=torch.Generator().manual_seed(1)).tolist()
    return datasets.Dataset.from_list([{"text": " ".join(f"w{number}" for number in row)} for row in rows])


def _assets(folder: Path) -> str:
    """A folder with the files of a small tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number + 3 for number in range(50)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


def ours(**options: Any) -> Any:
    """The configuration of our manager."""
    manager = importlib.import_module("holdfast.integrations.torchtitan").HoldfastCheckpoints
    return manager.Config(**{"enable": True, "interval": EVERY, **options})


def theirs(**options: Any) -> Any:
    """The configuration of torchtitan's manager, which writes torch's format."""
    from torchtitan.components.checkpointer import CheckpointManager

    return CheckpointManager.Config(**{"enable": True, "interval": EVERY, "last_save_model_only": False, **options})


def trainer(directory: str, checkpoint: Any, *, steps: int = STEPS, tensor_parallel: int = 1, width: int = 0) -> Any:
    """A Trainer of torchtitan for a small llama3, or of one that is as wide as you say; ``losses`` has them by step."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    DATASETS["tiny"] = DatasetConfig(path="", loader=lambda path: _words(), sample_processor=lambda row: row["text"])
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if width:
        model.tok_embeddings.num_embeddings = model.lm_head.out_features = model.vocab_size = width
    config.parallelism.spmd_backend, config.parallelism.tensor_parallel_degree = "partial_dtensor", tensor_parallel
    config.hf_assets_path = _assets(Path(directory) / f"assets-{RANK}")
    config.dump_folder, config.checkpoint = directory, checkpoint
    batch, length = (1, 16) if width else (2, 64)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = batch, length, steps
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.dataloader.dataset, config.validator.enable = "tiny", False
    config.optimizer.implementation = "foreach"
    config.debug.seed, config.debug.enable_structured_logging = 3, False
    made = config.build()
    for part in (part for model in made.model_parts for part in model.modules() if isinstance(part, FSDPModule)):
        part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
    made.losses = losses = Losses()
    log = made.metrics_processor.log

    def noting(step: int, loss: float, *others: Any, **more: Any) -> None:
        losses[step] = float(loss).hex()
        log(step, loss, *others, **more)

    made.metrics_processor.log = noting
    return made


def run_to_its_end(trainer: Any) -> Losses:
    """The losses of a run. When it returns, rank 0 has deleted what is not kept. The process group stays."""
    trainer.train()
    trainer.close()
    dist.barrier()
    return trainer.losses


def refusal(call: Callable[[], object], kind: type[Exception]) -> str:
    """What ``call`` says when it refuses."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def state_of(trainer: Any) -> tuple[Any, Any]:
    """Weights and optimizer state, whole and copied."""
    return whole(dict(trainer.checkpointer.states["model"].state_dict())), whole(trainer.optimizers.state_dict())


def another(make: Callable[[], Any]) -> Any:
    """What ``make`` makes in the process group that is there: a Trainer makes its own, and there can be one only."""
    dist.barrier()
    with mock.patch.object(dist, "init_process_group", return_value=None):
        return make()


def kill_in_the_save_of(step: int) -> None:
    """Have rank 0 kill all ranks when everything of ``step`` is written, and nothing is published."""
    pids: list[Any] = [None] * WORLD
    dist.all_gather_object(pids, os.getpid())
    place: Any = importlib.import_module("holdfast._native.writer").DirectoryPlace
    publish = place.publish

    def killing(path: str, *arguments: Any, **more: Any) -> None:
        if not path.endswith(f"step-{step}"):
            publish(path, *arguments, **more)
            return
        assert len(list(Path(path).glob("data-*"))) == WORLD
        for pid in (*pids[1:], pids[0]):
            os.kill(pid, signal.SIGKILL)

    place.publish = staticmethod(killing)


def unbroken(directory: str) -> str:
    """Train without a break, and note the losses."""
    losses = run_to_its_end(trainer(f"{directory}/unbroken", ours(asynchronous=False)))
    Path(directory, f"losses-{RANK}.json").write_text(json.dumps(losses))
    assert holdfast.Steps(f"{directory}/unbroken/checkpoint").latest().step == STEPS
    return f"{len(losses)} losses noted"


def killed(directory: str, *, asynchronous: bool | str) -> str:
    """Train until all ranks are killed in the middle of a save."""
    run = trainer(f"{directory}/killed", ours(asynchronous=asynchronous))
    kill_in_the_save_of(KILLED_AT)
    run.train()
    run.checkpointer.maybe_wait_for_saving()
    return "nobody was killed"


def resumed(directory: str, *, asynchronous: bool | str) -> str:
    """Go on where the run was killed: the torn save is nowhere, and the losses are those of the unbroken run."""
    root = Path(directory, "killed", "checkpoint")
    assert (root / f"step-{KILLED_AT}").is_dir(), "the save was not under way"
    assert [found.step for found in holdfast.Steps(root).steps()] == [EVERY]
    losses = run_to_its_end(trainer(f"{directory}/killed", ours(asynchronous=asynchronous)))
    expected = {
        int(step): loss for step, loss in json.loads(Path(directory, f"losses-{RANK}.json").read_text()).items()
    }
    assert losses == {step: loss for step, loss in expected.items() if step > EVERY}, (losses, expected)
    assert all(holdfast.verify(found.path).ok for found in holdfast.Steps(root).steps())
    assert any("list of numbers" in key for key in holdfast.open(root / f"step-{EVERY}")), "no long list was saved"
    return f"killed in the save of step {KILLED_AT}, resumed after {EVERY}: {len(losses)} losses bit-equal"


def saved(directory: str) -> str:
    """Train some steps on these ranks, for others to go on from."""
    run = trainer(f"{directory}/moved", ours())
    run_to_its_end(run)
    weights, moments = state_of(run)
    if RANK == 0:
        torch.save({"weights": weights, "moments": moments}, f"{directory}/state.pt")
    return f"saved on {WORLD} ranks"


def moved(directory: str, tensor_parallel: int = 1) -> str:
    """Go on with what other ranks have saved: the state is the same, the data is asked for."""
    expected = torch.load(f"{directory}/state.pt", weights_only=True)
    degree = WORLD // tensor_parallel
    with_data = degree == 2
    if not with_data:
        run = trainer(f"{directory}/moved", ours(stop=None), steps=STEPS + 2)
        assert "exclude 'dataloader' from loading" in refusal(run.checkpointer.load, MismatchError)
        run.close()
    options = ours(exclude_from_loading=[] if with_data else ["dataloader"])
    make = partial(trainer, f"{directory}/moved", options, steps=STEPS + 2, tensor_parallel=tensor_parallel)
    run = make() if with_data else another(make)
    assert run.checkpointer.load()
    weights, moments = state_of(run)
    assert_same(weights, expected["weights"])
    assert_same(moments, expected["moments"])
    assert run.step == STEPS
    assert run.dataloader.state_dict()["world_size"] == degree
    run.checkpointer.load = lambda step: True  # it is loaded
    losses = run_to_its_end(run)
    assert list(losses) == [STEPS + 1, STEPS + 2], losses
    data = "the data goes on" if with_data else "the data is refused, then begun anew"
    return f"saved on 2, loaded on {WORLD} ranks (tensor-parallel {tensor_parallel}): the same state; {data}"


def rotated(directory: str) -> str:
    """Save every step in the background and keep two, while an old step is held: what a reader has, stays."""
    told: list[events.Event] = []
    subscription = events.subscribe(told.append)
    root = Path(directory, "rotated", "checkpoint")
    run = trainer(f"{directory}/rotated", ours(interval=1, keep_latest_k=2))
    save = run.checkpointer.save

    def watching(step: int, last_step: bool = False) -> bool:
        result = save(step, last_step)
        whole_now = [found.step for found in holdfast.Steps(root).steps()]
        assert step < 3 or whole_now, "between two steps, there was none"
        return bool(result)

    run.checkpointer.save = watching
    run_to_its_end(run)
    subscription.close()
    found = holdfast.Steps(root).steps()
    assert [step.step for step in found] == [STEPS - 1, STEPS], found
    assert all(holdfast.verify(step.path).ok for step in found)
    removed = [event for event in told if event.name == "removed" and event.operation == "delete"]
    published = {event.step: event.at for event in told if event.name == "published"}
    if RANK == 0:
        assert len(removed) == STEPS - 2, removed
        for event in removed:
            number = int(event.path.rpartition("-")[2])
            assert event.at >= published[number + 2], "a step went before the second one after it was published"
    return f"{STEPS} saves in the background, {STEPS - 2} deletions, each after its successors were published"


def their_own(directory: str) -> str:
    """Go on from checkpoints that torchtitan made: the loader's pickle is refused unless it is allowed."""
    folder = f"{directory}/theirs"
    expected = run_to_its_end(trainer(folder, theirs()))
    dist.barrier()
    for later in (6, 9, 10) if RANK == 0 else ():
        shutil.rmtree(f"{folder}/checkpoint/step-{later}")
    run = another(partial(trainer, folder, ours()))
    assert "allow_pickle" in refusal(run.checkpointer.load, UnsafeError)
    run.close()
    losses = run_to_its_end(another(partial(trainer, folder, ours(allow_pickle=True))))
    assert losses == {step: loss for step, loss in expected.items() if step > EVERY}, (losses, expected)
    fresh = another(partial(trainer, folder, ours(exclude_from_loading=["dataloader"], load_only=True)))
    assert fresh.checkpointer.load(EVERY)
    assert fresh.step == EVERY
    fresh.close()
    assert [found.step for found in holdfast.Steps(f"{folder}/checkpoint").steps()] == [6, 9, 10]
    return f"loaded from torch's format at step {EVERY}, {len(losses)} losses bit-equal; its pickle refused first"


def stopped(directory: str) -> str:
    """A signal to one rank ends all of them after one step, which is durable; the next run goes on from it."""
    run = trainer(f"{directory}/stopped", ours(interval=100, stop=StopOn(signals=("SIGUSR1",))), steps=40)
    save = run.checkpointer.save

    def signalling(step: int, last_step: bool = False) -> bool:
        if step == 3 and RANK == WORLD - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return bool(save(step, last_step))

    run.checkpointer.save = signalling
    run.train()  # torch's @record takes SystemExit(0) for a normal end
    run.close()
    assert 3 <= run.step < 40, run.step
    assert holdfast.Steps(f"{directory}/stopped/checkpoint").latest().step == run.step
    again = another(partial(trainer, f"{directory}/stopped", ours(interval=100), steps=run.step + 2))
    assert list(run_to_its_end(again)) == [run.step + 1, run.step + 2]
    return "SIGUSR1 to one rank: all stop at one durable step, and go on after it"


def exported(directory: str) -> str:
    """The last step is whole, and the model is a Hugging Face folder, which another run begins with."""
    run = trainer(f"{directory}/exported", ours(last_save_in_hf=True, export_dtype="float32"))
    run_to_its_end(run)
    weights, _ = state_of(run)
    folder = f"{directory}/exported/checkpoint/hf"
    assert holdfast.verify(folder).ok
    assert Path(folder, "tokenizer.json").exists()
    options = ours(folder="from-hf", initial_load_in_hf=True, initial_load_path=folder)
    again = another(partial(trainer, f"{directory}/exported", options))
    assert again.checkpointer.load()
    assert again.step == 0
    assert_same(state_of(again)[0], weights)
    again.close()
    longer = another(partial(trainer, f"{directory}/exported", ours(), steps=STEPS + 1))
    assert list(run_to_its_end(longer)) == [STEPS + 1]
    return "exported, verified, loaded into a new run; the last step is whole, and the run goes on from it"


def in_store(directory: str) -> str:
    """Checkpoints in an object store, the one in this process's memory: saved, and resumed from."""
    url = "memory://torchtitan"
    expected = run_to_its_end(trainer(f"{directory}/whole", ours(folder=url)))
    steps = [found.step for found in holdfast.Steps(url).steps()]
    assert steps == [3, 6, 9, STEPS], steps
    assert not Path(directory, "whole", "checkpoint").exists()
    losses = run_to_its_end(another(partial(trainer, f"{directory}/again", ours(folder=url, load_step=6))))
    assert losses == {step: loss for step, loss in expected.items() if step > 6}, (losses, expected)
    assert all(holdfast.verify(found.path).ok for found in holdfast.Steps(url).steps())
    return f"saved to memory://, resumed after step 6: {len(losses)} losses bit-equal"


def measure(directory: str, config: Callable[..., Any], **options: Any) -> str:
    """What saves of about 1 GB cost, most of it the embedding and what AdamW knows of that."""
    settings = config(interval=1, keep_latest_k=0, **options)
    run = trainer(f"{directory}/measured", settings, width=150_000, steps=SAVES)
    manager = run.checkpointer
    cost = Cost(manager.maybe_wait_for_saving)
    save = manager.save

    def measured(step: int, last_step: bool = False) -> bool:
        with cost.save():
            return bool(save(step, last_step))

    manager.save = measured
    if config is theirs:  # ours waits in the handle's fence
        manager.maybe_wait_for_staging = cost.waiting(manager.maybe_wait_for_staging)
    run.train()
    told = cost.told(f"{directory}/measured/checkpoint/step-{SAVES}")
    run.close()
    return told


ACTIONS: dict[str, Callable[[str], str]] = {
    "unbroken": unbroken,
    "killed": partial(killed, asynchronous=False),
    "killed-async": partial(killed, asynchronous=True),
    "resumed": partial(resumed, asynchronous=False),
    "resumed-async": partial(resumed, asynchronous=True),
    "killed-process": partial(killed, asynchronous="process"),
    "resumed-process": partial(resumed, asynchronous="process"),
    "in-store": in_store,
    "saved": saved,
    "moved": moved,
    "moved-tensor-parallel": partial(moved, tensor_parallel=2),
    "rotated": rotated,
    "their-own": their_own,
    "stopped": stopped,
    "exported": exported,
    "measure-framework": partial(measure, config=theirs),
    "measure-framework-async": partial(measure, config=theirs, async_mode="async"),
    "measure-holdfast": partial(measure, config=ours),
    "measure-holdfast-sync": partial(measure, config=ours, asynchronous=False),
}


def client(directory: str) -> str:
    """What the action of the command line does."""
    try:
        importlib.import_module("torchtitan.models.llama3.config_registry")
    except ImportError as error:
        raise CannotRun(f"torchtitan's Trainer cannot be imported ({error}); it needs triton, also on CPU") from error
    return ACTIONS[sys.argv[2]](directory)


if __name__ == "__main__":
    run_client(client)
