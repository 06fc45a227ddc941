"""Targets that are more than tensors to be filled: those made of what a checkpoint says of itself, and those of which
several keys share memory.

The state of a parameter is made as the parameter is: on its device and, where the shapes agree, with its mesh and
placements. Everything else is made as ``read`` makes it: whole, and on the CPU.

Of keys that share memory, equal data is loaded and different data is told. What the planner could not know from
digests is known by reading: the first key of a tie is loaded with everything else; then, one after the other, what is
stored of the rest is compared with the memory, or loaded, and what was there before compared with it. So the memory
never holds a mixture: in the end the last key in the order of the target is whole.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from holdfast._state.nested import set_element, unflatten
from holdfast._state.pieces import Place, Tied, is_meta, is_sharded, pieces_of
from holdfast._state.stateful_values import Owners
from holdfast._state.tensors import CONTEXT_KEY, empty_quantized, empty_tensor, is_composed
from holdfast._values.box import Box, flat_range_boxes, whole
from holdfast._values.lazy import LazyList
from holdfast._values.records import parts_of
from holdfast.errors import Difference, InvalidStateError, MismatchError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    Containers,
    Metadata,
    Path,
    TensorStorageMetadata,
    path_key,
    restorable_paths,
)
from holdfast.planner import LoadPlan, read_columns
from holdfast.planner_helpers import ReadRows
from holdfast.storage import StorageReader

if TYPE_CHECKING:
    from holdfast.default_planner.load_planner import DefaultLoadPlanner


def empty_state(
    metadata: Metadata,
    keys: Iterable[str] | None = None,
    likes: Mapping[str, torch.Tensor | torch.device] | None = None,
) -> STATE_DICT_TYPE:
    """A flat target on the CPU for ``keys`` of the checkpoint, or all; tied keys share a tensor, values are None.

    ``likes`` has devices for some, or tensors of the same size to take after: device, mesh, placements and strides.
    """
    likes = likes or {}
    leaves: STATE_DICT_TYPE = {}
    chosen = list(metadata.state_dict_metadata if keys is None else keys)
    stored_here = set(chosen)
    tied: list[tuple[str, str]] = []
    for key in chosen:
        stored = metadata.state_dict_metadata[key]
        if isinstance(stored, BytesStorageMetadata):
            leaves[key] = None
        elif stored.alias_of in stored_here and likes.get(key) is likes.get(stored.alias_of):
            leaves[key] = None
            tied.append((key, stored.alias_of))
        elif stored.kind == "numpy":
            leaves[key] = empty_tensor(stored.size, stored.properties.dtype).numpy()
        elif stored.quantizer is not None:
            leaves[key] = empty_quantized(stored.size, stored.properties.dtype, stored.quantizer)
        else:
            like, dtype = likes.get(key), stored.properties.dtype
            if isinstance(like, torch.Tensor):
                leaves[key] = torch.empty_like(like, dtype=dtype, device=like.device)
            else:
                leaves[key] = empty_tensor(stored.size, dtype, like or "cpu")
    for key, first in tied:
        alike = _requires_grad(metadata, key) == _requires_grad(metadata, first)
        leaves[key] = leaves[first] if alike else leaves[first].detach()
    return leaves


def require_gradients(metadata: Metadata, leaves: STATE_DICT_TYPE) -> None:
    """Have the tensors among ``leaves`` require gradients that did so when they were saved."""
    for key, leaf in leaves.items():
        if _requires_grad(metadata, key):
            leaf.requires_grad_()


def chosen_keys(metadata: Metadata, keys: Collection[str] | None, *, allow_missing: bool = False) -> list[str]:
    """The keys of the checkpoint that ``keys`` name, or all; a name stands for itself and all below it, after a dot.

    MismatchError for names that stand for nothing, unless ``allow_missing``.
    """
    if keys is None:
        return list(metadata.state_dict_metadata)
    names = {keys} if isinstance(keys, str) else set(keys)
    chosen: list[str] = []
    met: set[str] = set()
    for key in metadata.state_dict_metadata:
        matching = names.intersection(prefixes(key))
        if matching:
            chosen.append(key)
            met |= matching
    if names - met and not allow_missing:
        raise MismatchError.of(
            [Difference(key=name, kind="missing", stored="nothing", wanted="a key") for name in sorted(names - met)],
            advice="Ask for a key, or for the part of a key before one of its dots.",
        )
    return chosen


def prefixes(key: str) -> Iterator[str]:
    """``key`` and all that comes before one of its dots, the longest first."""
    yield key
    end = key.rfind(".")
    while end >= 0:
        yield key[:end]
        end = key.rfind(".", 0, end)


def _requires_grad(metadata: Metadata, key: str) -> bool:
    stored = metadata.state_dict_metadata[key]
    return isinstance(stored, TensorStorageMetadata) and stored.properties.requires_grad


def take_whole_values(
    leaves: STATE_DICT_TYPE, paths: dict[str, Path], metadata: Metadata, containers: Containers
) -> None:
    """Ask for a container of the target as the one value that the checkpoint has of it.

    So torch stores a tuple of tensors and, before version 2.4, a dict without tensors in it; we, a dataclass without.
    """
    stored = metadata.state_dict_metadata
    below: dict[Path, list[str]] = {}
    for key in leaves:
        path = paths[key]
        for length in range(1, len(path)):
            if isinstance(stored.get(path_key(path[:length])), BytesStorageMetadata):
                below.setdefault(path[:length], []).append(key)
    for path, keys in below.items():
        name = path_key(path)
        if name in leaves or any(key in stored or key not in leaves for key in keys):
            continue
        for key in keys:
            del leaves[key]
        like = containers.get(path)
        leaves[name], paths[name] = like if parts_of(like) else None, path


@dataclass(frozen=True, slots=True, eq=False)
class _Room:
    """An empty place in the target, the parameter whose state belongs there, and where in it each stored key goes.

    A key goes to None where the checkpoint does not say how it is nested.
    """

    path: Path
    parameter: torch.Tensor | None = None
    content: dict[str, Path | None] = field(default_factory=dict)


def is_empty_container(leaf: object) -> bool:
    """Whether nothing is in it, and something could be."""
    return isinstance(leaf, (dict, list, tuple, set, frozenset, deque)) and not leaf


def fill_empty_containers(
    target: STATE_DICT_TYPE, leaves: STATE_DICT_TYPE, paths: dict[str, Path], metadata: Metadata, owners: Owners
) -> tuple[list[str], list[Difference]]:
    """The keys that now have a place in ``target``, ``leaves`` and ``paths``; and what is refused one, with why."""
    empty = {paths[key]: key for key, leaf in leaves.items() if is_empty_container(leaf)}
    rooms = {path: _Room(path) for path in (empty if target else [()]) if path not in owners.modules}
    rooms.update((path, _Room(path, parameter)) for path, parameter in owners.parameters.items())
    if not rooms:
        return [], []
    optimizers = {path[:-1] for path in owners.parameters}
    _sort_in(rooms, optimizers, leaves, paths, metadata)
    tensors = (leaf for leaf in (*leaves.values(), *owners.parameters.values()) if isinstance(leaf, torch.Tensor))
    is_spread = any(map(is_sharded, tensors))
    filled: list[_Room] = []
    refused: list[Difference] = []
    for room in rooms.values():
        if not room.content:
            continue
        reason = _refusal(room, optimizers, leaves, metadata, is_spread=is_spread)
        if reason is None:
            filled.append(room)
        else:
            refused.append(Difference(key=path_key(room.path), kind="place", stored="something", wanted=reason))
    made = _made(filled, metadata)
    for room in sorted(filled, key=lambda room: len(room.path)):  # so that nothing is put over what is further in
        tails: dict[str, Path] = {key: ("", *(tail or ())) for key, tail in room.content.items()}
        depth, containers = len(room.path), metadata.containers
        inside: Containers = {("", *at[depth:]): like for at, like in containers.items() if at[:depth] == room.path}
        content = unflatten({key: made[key] for key in tails}, tails, inside)[""]
        if room.path:
            set_element(target, room.path, content)
        else:
            target.update(content)
        paths.update((key, (*room.path, *tail[1:])) for key, tail in tails.items())
    for container in {room.path for room in filled} | {room.path[:-1] for room in filled}:
        if container in empty:
            del leaves[empty[container]]
    for key in sorted(made.keys() & leaves.keys()):
        raise InvalidStateError(f"key {key!r} stands for two entries of the target; rename one", key=key)
    leaves.update(made)
    return list(made), refused


def _sort_in(
    rooms: dict[Path, _Room],
    optimizers: Collection[Path],
    leaves: STATE_DICT_TYPE,
    paths: Mapping[str, Path],
    metadata: Metadata,
) -> None:
    """Put each stored key that is no leaf of the target into the innermost of ``rooms`` that it is below, if any."""
    stored_paths, names = restorable_paths(metadata), {path_key(path): path for path in rooms}
    for key in metadata.state_dict_metadata:
        path = stored_paths.get(key, (key,) if () in rooms else None)
        # An empty container that has the key by chance, as {"a": [], "a.0": []} has that of a[0], is another leaf.
        if key in leaves and (path in (None, paths[key]) or not is_empty_container(leaves[key])):
            continue
        if path is None:
            room = next((rooms[names[name]] for name in prefixes(key) if name in names), None)
        else:
            room = next((rooms[path[:end]] for end in range(len(path), -1, -1) if path[:end] in rooms), None)
        if room is None:
            continue
        if path is not None and room.path in optimizers:  # it belongs to no parameter: each of its kind for itself
            place = path[: len(room.path) + 1]
            room = rooms[place] = _Room(place)
        room.content[key] = None if path is None else path[len(room.path) :]


def _refusal(
    room: _Room, optimizers: Collection[Path], leaves: Collection[str], metadata: Metadata, *, is_spread: bool
) -> str | None:
    """Why what was found for ``room`` cannot be put there, and what to do; None where it can."""
    stored = [metadata.state_dict_metadata[key] for key in room.content]
    needs_placement = is_spread and any(isinstance(each, TensorStorageMetadata) and len(each.size) for each in stored)
    path = room.path
    if None in room.content.values():
        return "the checkpoint does not say how it is nested; put each of its keys into the target"
    if room.parameter is not None:
        if is_meta(room.parameter):
            return "its parameter is on the meta device; make the optimizer after the parameters have memory"
        if any(tail and CONTEXT_KEY in tail for tail in room.content.values()):
            return "it has tensor subclasses; have the optimizer make its state first (get_optimizer_state_dict does)"
    elif path[:-1] in optimizers:
        if str(path[-1]).isdigit():
            return "the optimizer has no such parameter; give it the parameters that it had at the save"
        if needs_placement:
            return "it is stored by name, not by number; load into the result of torch's get_optimizer_state_dict"
    elif needs_placement and path[-1:] == ("state",) and path_key((*path[:-1], "param_groups.0.params")) in leaves:
        return "its sharding is unknown; put the optimizer itself into the target, not its state_dict()"
    return None


def _made(rooms: Collection[_Room], metadata: Metadata) -> STATE_DICT_TYPE:
    """A leaf for each key in ``rooms``, like the parameter whose state it is.

    Steps stay on the CPU: torch moves them where it wants them. A name whose shape is another one than the parameter's
    anywhere is no state of each element, and whole everywhere: its shape may be a parameter's by chance.
    """
    states: list[tuple[str, tuple[Path, Path], torch.Tensor, bool]] = []
    for room in rooms:
        for key, tail in room.content.items():
            stored, parameter = metadata.state_dict_metadata[key], room.parameter
            if parameter is not None and tail and tail[-1] != "step" and isinstance(stored, TensorStorageMetadata):
                agrees = parameter.size() == stored.size and not is_composed(parameter)
                states.append((key, (room.path[:-1], tail), parameter, agrees))
    others = {name for _, name, _, agrees in states if not agrees}
    likes = {key: parameter.device if name in others else parameter for key, name, parameter, _ in states}
    made = empty_state(metadata, [key for room in rooms for key in room.content], likes)
    require_gradients(metadata, made)
    return made


def check_filled(planner: DefaultLoadPlanner, plan: LoadPlan) -> None:
    """MismatchError where a rank's own metadata, which describes parts of tensors, has not all of a target."""
    columns = read_columns(plan.items)
    filled: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for row, (which, length) in enumerate(columns.boxes):
        dimensions = columns.dimensions[which]
        piece = tuple(columns.target_lo[row, : max(0, dimensions)].tolist())
        filled[columns.keys[which], piece] += torch.Size(length).numel()
    wanted = {
        key: leaf for key in dict.fromkeys(columns.keys) if isinstance(leaf := planner.state_dict[key], torch.Tensor)
    }
    faults = [
        Difference(key=key, kind="missing", stored="another rank's part", wanted=f"{list(piece.box.lengths)}")
        for key, leaf in wanted.items()
        if key not in planner.left_out
        for piece in pieces_of(key, leaf).pieces
        if filled[key, piece.box.offsets] < piece.box.volume
    ]
    if faults:
        raise MismatchError.of(
            faults, advice="Each rank saved its own part: load on as many ranks, with the same layout."
        )


# So much is read aside at a time.
_COMPARED_BYTES = 16 << 20


def tied(key: str, other: str) -> Difference:
    """That ``key`` cannot be loaded, because ``other`` has the same memory and is loaded."""
    return Difference(key=key, kind="tied", stored=f"other data than {other!r}", wanted=f"the memory of {other!r}")


def settle_ties(planner: DefaultLoadPlanner, reader: StorageReader, plan: LoadPlan) -> None:
    """Load what ``plan`` left out, once that is read; MismatchError, or a difference, for what does not fit."""
    for tie in planner.ties:
        _settle(planner, _AsideReader(planner, reader, plan), tie)


def _settle(planner: DefaultLoadPlanner, aside: _AsideReader, tie: Tied) -> None:
    """Leave the last key of the tie whole in the memory; the others have what that leaves of them."""
    first, *others = tie.keys
    if tie.is_exact:
        other = next((key for key in others if not aside.is_there(key)), None)
        if other is None:
            return
        if planner.strict:
            raise _mismatch(planner.told([tied(first, other)]))
        others = others[-1:]
    for key in others:
        aside.read(planner, [(key, place.box) for place in planner.places(key)])
    differences = [tied(key, tie.keys[-1]) for key in tie.keys[:-1] if not aside.is_there(key)]
    if differences and planner.strict:
        raise _mismatch(planner.told(differences))
    planner.differences += differences


@dataclass(frozen=True, slots=True, eq=False)
class _AsideReader:
    """Reads after the load what it has left out."""

    planner: DefaultLoadPlanner
    reader: StorageReader
    plan: LoadPlan

    def read(self, planner: DefaultLoadPlanner, boxes: list[tuple[str, Box | None]]) -> None:
        assert self.planner.metadata is not None
        rows = ReadRows()
        for key, box in boxes:
            stored = self.planner.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            rows.add_tensor(key, stored, box)
        columns = self.planner.as_stored(rows.columns())
        self.reader.read_data(dataclasses.replace(self.plan, items=LazyList(columns)), planner).wait()

    def is_there(self, key: str) -> bool:
        """Whether the memory of ``key`` holds what is stored of it, bit for bit."""
        return all(self._holds(place, part) for place in self.planner.places(key) for part in _parts(place.tensor))

    def _holds(self, place: Place, part: Box) -> bool:
        held = place.tensor[part.slices()]
        aside = held.clone() if held.is_quantized else torch.empty(held.shape, dtype=held.dtype, device=held.device)
        offsets = (0,) * len(part.offsets) if place.box is None else place.box.offsets
        box = Box(tuple(low + by for low, by in zip(part.offsets, offsets, strict=True)), part.lengths)
        self.read(self.planner.aside(place.key, aside), [(place.key, box)])
        return torch.equal(_bits(held), _bits(aside))


def _mismatch(differences: list[Difference]) -> MismatchError:
    return MismatchError.of(
        differences,
        advice="Give each key its own memory, or pass strict=False to load the last one. "
        "The contents of the target are undefined now.",
    )


def _parts(tensor: torch.Tensor) -> Iterator[Box]:
    """The tensor in boxes that are not too large; a quantised one as a whole, since its scales may go with its rows."""
    if tensor.is_quantized:
        yield whole(tensor.shape)
        return
    step = max(1, _COMPARED_BYTES // tensor.element_size())
    for start in range(0, tensor.numel(), step):
        yield from flat_range_boxes(tuple(tensor.shape), start, min(start + step, tensor.numel()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """What the elements are, bit for bit; of a quantised tensor, what they stand for."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
