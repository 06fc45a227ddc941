"""Models of transformers through holdfast and back, and other readers on the folders that it exports; offline.

Four ranks shard each model and export it; one process loads that with ``from_pretrained`` and compares parameters and
logits. What ``save_pretrained`` wrote is loaded into the model on four ranks, and on two. Prints what came of each
case; the exit code is 1 if one failed. ``python integrations/huggingface.py WORD ...`` runs those with all the words.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import huggingface_ranks as ranks
import huggingface_readers as readers
import torch
import transformers
from huggingface_models import MODELS

from tools.crew import Crew

RANKS, FEWER_RANKS = 4, 2
TIMEOUT_S = 300.0
READ_BY_OTHERS = "qwen3"  # whose names are the same inside and outside, so that everyone can read it
TIED = "llama, tied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to prove: ``run`` returns a note, or raises."""

    package: str
    name: str
    run: Callable[[], str]


def written_by_transformers(name: str, folder: Path) -> Path:
    """The folder that ``save_pretrained`` writes of the model ``name``."""
    path = folder / f"{name} from transformers"
    if not path.exists():
        MODELS[name].make().save_pretrained(path, max_shard_size="60KB")
    return path


def assets_of(name: str, folder: Path) -> Path:
    """A folder with the config of the model ``name``, to be copied beside an export."""
    path = folder / f"{name} assets"
    MODELS[name].make_empty().config.save_pretrained(path)
    return path


def model_cases(folder: Path, crew: Crew, fewer: Crew) -> Iterator[Case]:
    """Each model, out and in."""
    for name in MODELS:
        exported = folder / f"{name} exported"

        def run_export(name: str = name, exported: Path = exported) -> str:
            assets = assets_of(name, folder)
            return str(crew.run(RANKS, ranks.export_model, name, exported, assets, timeout_s=TIMEOUT_S)[0])

        def load_on(crew: Crew, count: int, source: Callable[[], Path], name: str = name) -> str:
            return str(crew.run(count, ranks.load_model, name, source(), timeout_s=TIMEOUT_S)[0])

        theirs = partial(written_by_transformers, name, folder)
        yield Case(package="holdfast", name=f"{name}: export, {RANKS} ranks", run=run_export)
        read = partial(readers.from_pretrained, name, exported)
        yield Case(package="transformers", name=f"{name}: from_pretrained of it", run=read)
        what = f"{name}: save_pretrained, loaded on"
        for count, on in ((RANKS, crew), (FEWER_RANKS, fewer)):
            yield Case(package="holdfast", name=f"{what} {count} ranks", run=partial(load_on, on, count, theirs))
        run = partial(readers.converted, name, theirs, folder)
        yield Case(package="holdfast", name=f"{name}: save_pretrained, converted to native and back", run=run)
        run = partial(load_on, fewer, FEWER_RANKS, partial(Path, exported))
        yield Case(package="holdfast", name=f"{name}: its own export, loaded on {FEWER_RANKS} ranks", run=run)


def other_cases(folder: Path, crew: Crew) -> Iterator[Case]:
    """Other readers, and the forms that an export can have."""
    exported = folder / f"{READ_BY_OTHERS} exported"
    wanted = MODELS[READ_BY_OTHERS].make().state_dict()
    for package, reader in (
        ("safetensors", readers.safe_open),
        ("safetensors", readers.load_file),
        ("huggingface_hub", readers.load_state_dict_from_file),
        ("fastsafetensors", readers.fast_loader),
    ):
        yield Case(package=package, name=reader.__name__, run=partial(reader, exported, wanted))
    for package, into_model in (
        ("huggingface_hub", readers.load_torch_model),
        ("accelerate", readers.load_checkpoint_in_model),
    ):
        for name in (READ_BY_OTHERS, TIED):
            run = partial(into_model, folder / f"{name} exported", name)
            yield Case(package=package, name=f"{into_model.__name__}, {name}", run=run)

    def run_task(task: Callable[..., str], *arguments: object) -> str:
        return str(crew.run(RANKS, task, *arguments, timeout_s=TIMEOUT_S)[0])

    odd, background, cast = folder / "odd", folder / "background", folder / "cast"
    assets = assets_of(TIED, folder)
    yield Case(package="holdfast", name="export of odd tensors", run=partial(run_task, ranks.export_odd_tensors, odd))
    yield Case(package="safetensors", name="odd tensors", run=partial(readers.odd_in_safetensors, odd))
    run = partial(run_task, ranks.export_in_background, TIED, background, assets)
    yield Case(package="holdfast", name="async_export", run=run)
    yield Case(
        package="transformers", name="from_pretrained of it", run=partial(readers.from_pretrained, TIED, background)
    )
    run = partial(run_task, ranks.export_model, TIED, cast, assets, torch.float16)
    yield Case(package="holdfast", name="export as float16", run=run)
    read = partial(readers.from_pretrained, TIED, cast, torch.float16)
    yield Case(package="transformers", name="from_pretrained of float16", run=read)


def run(case: Case) -> tuple[str, str]:
    """What came of a case, and a note."""
    try:
        return "passed", case.run()
    except Exception as error:
        print(f"--- {case.package}, {case.name}\n{traceback.format_exc()[-4000:]}", file=sys.stderr)
        return "FAILED", f"{type(error).__name__}, see above"


def main() -> int:
    """Run the cases that have all the words of the command line, or all, and return the exit code."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-huggingface-")))
        crew, fewer = stack.enter_context(Crew()), stack.enter_context(Crew())
        for case in (*model_cases(folder, crew, fewer), *other_cases(folder, crew)):
            if all(word in f"{case.package} {case.name}" for word in sys.argv[1:]):
                result, note = run(case)
                results.append(result)
                package = f"{case.package} {importlib.metadata.version(case.package)}"
                print(f"{package:24} {case.name:60} {result:8} {note}", flush=True)
    failed = results.count("FAILED")
    print(f"torch {torch.__version__}, CPU and gloo: {len(results) - failed} of {len(results)} passed")
    return int(failed > 0 or not results)


if __name__ == "__main__":
    sys.exit(main())
