"""Rules for models of transformers: outside is what its ``save_pretrained`` writes, inside the state of the model.

transformers has tables of its own: how keys are renamed, and by which operations tensors are converted as they are
loaded. Names are asked of these, key by key, so a name is what transformers makes of it. Operations are translated
one by one; one that is not known here is refused by its name. What many keys have in common, but for their numbers,
becomes one rule. transformers is imported only where a mapping is made.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from holdfast._mapping.rules import (
    Concat,
    Deinterleave,
    Drop,
    Interleave,
    Move,
    Operation,
    Rule,
    Split,
    Stack,
    Tie,
    Transpose,
    Unstack,
)

_INSTALL = "Mapping.from_transformers needs transformers 5: pip install 'transformers>=5'"
# Stands for the number of an expert until a rule is made of it: no model has so many.
_LIST_NUMBER = "987654321"
_LETTERS = "ijklmnop"
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")


class _Transform(Protocol):
    """What transformers has for a renaming, or for a conversion, which has ``operations``."""

    source_patterns: list[str]
    target_patterns: list[str]

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]: ...
    def reverse_transform(self) -> _Transform: ...


class _TheirOperation(Protocol):
    """What transformers has for an operation; which of these are there depends on the class."""

    dim0: int
    dim1: int
    inverse: bool
    subconfig_key: str | None
    permute_layer_names: list[str] | None


class _Converter(_Transform, Protocol):
    """A conversion, as it is done when a model is saved."""

    operations: list[_TheirOperation]


def rules_of(model: object) -> list[Rule]:
    """The rules for ``model``, or for the model that its configuration ``model`` names."""
    try:
        from transformers import PretrainedConfig, PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter
    except ImportError as error:
        raise ImportError(f"{_INSTALL} ({error})") from error
    if isinstance(model, PretrainedConfig):
        model = _of_config(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"a mapping is made of a model of transformers or its config, not of a {type(model).__name__}")
    known = getattr(model, "_weight_conversions", None)
    if known is None:
        # As save_pretrained has it: no legacy names, and no prefix of which nobody knows whether it was there.
        made = get_model_conversion_mapping(_by_its_own_classes(model), add_legacy=False)
        known = [each for each in made if not isinstance(each, PrefixChange)]
    undone = [copy.deepcopy(each).reverse_transform() for each in reversed(known)]
    converters = [each for each in undone if isinstance(each, WeightConverter)]
    renamings = [each for each in undone if not isinstance(each, WeightConverter)]
    state: list[str] = sorted(model.state_dict())
    ignored = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}.intersection(state)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    ties = {key: other for key, other in tied.items() if {key, other} <= {*state} and key not in ignored}
    moves = _moves(
        [key for key in state if key not in ignored and key not in ties], converters, renamings, model.config
    )
    return [*map(_drop, sorted(ignored)), *(Tie(*pair) for pair in ties.items()), *_generalised(moves, state)]


def _by_its_own_classes(model: torch.nn.Module) -> torch.nn.Module:
    """``model``, or one like it where FSDP2 has given its modules other classes: conversions go by names of classes."""
    from torch.distributed.fsdp import FSDPModule

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    classes = (each for each in type(model).__mro__ if issubclass(each, torch.nn.Module))
    own = next(each for each in classes if not issubclass(each, FSDPModule))
    with torch.device("meta"):
        made: torch.nn.Module = getattr(own, "_from_config", own)(getattr(model, "config", None))
    return made


def _drop(key: str) -> Drop:
    return Drop(inside=key)


def _of_config(config: object) -> object:
    """The model that ``config`` is of, without memory."""
    import transformers

    names: Sequence[str] = getattr(config, "architectures", None) or ()
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise ValueError(
            f"the config names no model of transformers in its architectures ({list(names)}); give the model"
        )
    with torch.device("meta"):
        made: object = found._from_config(config) if hasattr(found, "_from_config") else found(config)
    return made


class _Conversion(NamedTuple):
    """A rule for one key, or for the keys that one conversion has to do with."""

    outsides: tuple[str, ...]
    insides: tuple[str, ...]
    operations: tuple[Operation, ...] = ()


def _moves(
    state: Iterable[str], converters: Sequence[_Converter], renamings: Sequence[_Transform], config: object
) -> list[_Conversion]:
    """A rule for all that has another name outside, or is converted."""

    def renamed(key: str) -> str:
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        return key

    moves: list[_Conversion] = []
    groups: dict[tuple[int, str], dict[str, str]] = {}
    for key in state:
        for number, converter in enumerate(converters):
            made, source = converter.rename_source_key(key)
            if source is not None:
                groups.setdefault((number, made), {})[source] = _with_list_number(key, source)
                break
        else:
            if renamed(key) != key:
                moves.append(_Conversion((renamed(key),), (key,)))
    for (number, made), members in groups.items():
        converter = converters[number]
        before, first, after = made.partition(converter.target_patterns[0])
        if not first:
            raise ValueError(f"the conversion {converter} of transformers has names that no rule can have")
        names = [f"{before}{target}{after}".replace("*", _LIST_NUMBER) for target in converter.target_patterns]
        sources = [source for source in converter.source_patterns if source in members]
        operations = _operations(converter, sources, config)
        moves.append(_Conversion(tuple(map(renamed, names)), tuple(members[each] for each in sources), operations))
    return moves


def _with_list_number(key: str, source: str) -> str:
    """``key`` with the number that stands for all of its list, where the pattern ``source`` has one."""
    if "*" not in source:
        return key
    found = re.search(re.escape(source).replace(r"\*", "([0-9]+)"), key)
    if found is None:
        raise ValueError(f"the pattern {source!r} of transformers has no number for {key!r}")
    return f"{key[: found.start(1)]}{_LIST_NUMBER}{key[found.end(1) :]}"


def _operations(converter: _Converter, sources: list[str], config: object) -> tuple[Operation, ...]:
    """What leads from outside to inside, if the operations of ``converter`` lead from inside to outside."""
    names = sources
    found: list[Operation] = []
    for operation in converter.operations:
        kind = type(operation).__name__
        dim: int = getattr(operation, "dim", 0)
        if getattr(operation, "num_shards_attribute", None) is not None or getattr(operation, "check_dims", False):
            kind += f" with {vars(operation)}"
        if kind == "Chunk":
            found.append(Concat(dim))
            names = converter.target_patterns
        elif kind == "Concatenate":
            found.append(Split(dim, (1,) * len(sources)))  # which transformers loads by a Chunk
            names = converter.target_patterns
        elif kind == "SplitModulelist":
            found.append(Stack(dim))
        elif kind == "MergeModulelist":
            found.append(Unstack(dim))
        elif kind == "Transpose":
            found.append(Transpose(operation.dim0, operation.dim1))
        elif kind == "Interleave":
            found.append(Deinterleave(dim) if operation.inverse else Interleave(dim))
        elif kind == "PermuteForRope":
            found += _row_order(operation, names, config)
        else:
            raise ValueError(f"the operation {kind} of transformers has no rule; it converts {converter}")
    return tuple(reversed(found))


def _row_order(operation: _TheirOperation, names: Sequence[str], config: object) -> Iterator[Operation]:
    """The order of rows for rotary embeddings, of the tensors among ``names`` that have it."""
    chosen = operation.permute_layer_names
    only = tuple(number for number, name in enumerate(names) if chosen is None or any(part in name for part in chosen))
    if only:
        config = config if operation.subconfig_key is None else getattr(config, operation.subconfig_key, config)
        heads: int = getattr(config, "num_attention_heads", 1)
        made = Deinterleave if operation.inverse else Interleave
        yield made(0, heads, 2, () if len(only) == len(names) else only)


def _generalised(moves: Iterable[_Conversion], state: Iterable[str]) -> Iterator[Move]:
    """``moves``, those that differ in numbers only as one, unless that would have other keys of the state too."""
    numbers_of: dict[str, set[tuple[str, ...]]] = {}
    for key in state:
        numbers_of.setdefault(_NUMBER.sub("#", key), set()).add(tuple(_NUMBER.findall(key)))
    alike: dict[Move, list[_Conversion]] = {}
    for move in moves:
        alike.setdefault(_pattern_of(move), []).append(move)
    for general, each in alike.items():
        meant = [
            {tuple(_NUMBER.findall(move.insides[place])) for move in each} for place in range(len(each[0].insides))
        ]
        found = (numbers_of.get(_NUMBER.sub("#", inside), set()) for inside in each[0].insides)
        is_all = all(len(mine) == len(there) for mine, there in zip(meant, found, strict=True))
        is_list = any(_LIST_NUMBER in inside for inside in each[0].insides)
        yield from [general] if is_all or is_list else [_with_letters(move, "") for move in each]


def _pattern_of(move: _Conversion) -> Move:
    """``move`` with a letter for each number, where all of its names have the same in the same order."""
    names = [*move.outsides, *move.insides]
    numbers = {tuple(number for number in _NUMBER.findall(name) if number != _LIST_NUMBER) for name in names}
    return _with_letters(move, "" if len(numbers) > 1 or len(*numbers) > len(_LETTERS) else _LETTERS)


def _with_letters(move: _Conversion, letters: str) -> Move:
    outside, inside = (tuple(_lettered(name, letters) for name in side) for side in (move.outsides, move.insides))
    return Move(outside, inside, move.operations)


def _lettered(name: str, letters: str) -> str:
    left = iter(letters)
    return _NUMBER.sub(
        lambda found: "{e}" if found[0] == _LIST_NUMBER else f"{{{next(left)}}}" if letters else found[0], name
    )
