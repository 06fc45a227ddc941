"""Layouts: all that defines what the ranks of a job hold, said once for all ranks of which it is true; and the plan
made of them.

A layout has the keys, what they are, the rule of each, and their paths. A rule says that a leaf is whole, or how it is
spread over a mesh, or, where only the rank itself knows, it lists the boxes that this rank holds. The ``text`` of a
layout is made in one way, so that ranks have the same layout exactly when the 128-bit fingerprints of their texts are
the same. What a rank holds follows from layout and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import xxhash

from holdfast._plan.holdings import HeldRows, Holding, holding_of
from holdfast._plan.shares import MemberBoxes, box_words, boxes_on_mesh
from holdfast._save_plan.plans import UNKNOWN, LocalLeaves, agreed_heads, properties_of
from holdfast._save_plan.together import JointPlan
from holdfast._state.nested import Path, TupleIndex, TypedKey
from holdfast._state.pieces import Spread
from holdfast._state.tensors import DTYPE_NAMES, torch_dtype
from holdfast._values.box import Split
from holdfast._values.digest import name_words
from holdfast._values.lazy import cached_property
from holdfast.planner import TensorHead, WriteColumns, padded

_Head = tuple[str, tuple[int, ...], bool, str | None, str | None]

WHOLE = -1
"""The rule of a key that every rank has whole."""


class _Mesh(msgspec.Struct, frozen=True, array_like=True):
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


_NOWHERE = _Mesh((), ())


class _Rule(msgspec.Struct, frozen=True, array_like=True, tag="spread"):
    mesh: int
    splits: tuple[tuple[Split, ...], ...]


class _Listed(msgspec.Struct, frozen=True, array_like=True, tag="listed"):
    lo: tuple[tuple[int, ...], ...]
    length: tuple[tuple[int, ...], ...]


class _Text(msgspec.Struct, frozen=True, array_like=True):
    keys: list[str]
    heads: list[_Head | None]
    rules: list[int]
    spreads: list[_Rule | _Listed]
    meshes: list[_Mesh]
    steps: list[object]
    lenient: list[str] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Text).decode


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the ranks with one layout have: ``text`` says all of it, ``paths`` are the keys' places in the state."""

    text: bytes
    paths: dict[str, Path] | None

    def __getstate__(self) -> dict[str, object]:
        return {"text": self.text, "paths": self.paths}

    @cached_property
    def fingerprint(self) -> bytes:
        """What tells this layout from all others."""
        return xxhash.xxh3_128_digest(self.text)

    @cached_property
    def said(self) -> _Text:
        return _decode(self.text)

    @cached_property
    def keys(self) -> list[str]:
        """The keys, in the order in which the ranks have them."""
        return self.said.keys

    @cached_property
    def heads(self) -> list[TensorHead | None]:
        """What every key is."""
        return [None if head is None else _head_of(head) for head in self.said.heads]

    @property
    def rules(self) -> list[int]:
        """The number of each key's rule; WHOLE where there is none."""
        return self.said.rules

    @cached_property
    def lenient(self) -> frozenset[str]:
        """The keys whose contents may differ between ranks."""
        return frozenset(self.said.lenient)

    def boxes(self, rule: int, size: tuple[int, ...], ranks: np.ndarray) -> MemberBoxes:
        """What ``ranks``, which have this layout, hold of a tensor of ``size`` under that rule; by rank.

        The member of a box is its rank's place in ``ranks``.
        """
        if rule == WHOLE:
            lo, length = (np.empty((len(ranks), len(size)), dtype=np.int64) for _ in range(2))
            lo[:], length[:] = 0, size
            return MemberBoxes(member=np.arange(len(ranks)), lo=lo, length=length)
        spread = self.said.spreads[rule]
        if isinstance(spread, _Listed):
            lo, length = (np.array(each, dtype=np.int64).reshape(-1, len(size)) for each in (spread.lo, spread.length))
            member = np.repeat(np.arange(len(ranks)), len(lo))
            return MemberBoxes(member=member, lo=np.tile(lo, (len(ranks), 1)), length=np.tile(length, (len(ranks), 1)))
        mesh = self.said.meshes[spread.mesh]
        found = boxes_on_mesh(size, mesh.shape, spread.splits)
        names = np.array(mesh.ranks, dtype=np.int64)
        place = np.full(max(int(names.max(initial=-1)), int(ranks.max(initial=-1))) + 1, -1, dtype=np.int64)
        place[ranks] = np.arange(len(ranks))
        member = place[names[found.member]]
        order = np.argsort(member, kind="stable")
        order = order[np.searchsorted(member[order], 0) :]
        return MemberBoxes(member=member[order], lo=found.lo[order], length=found.length[order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """Ranks, ascending, and the part of their layouts that all of them have and nobody else has like that."""

    layout: Layout
    ranks: np.ndarray


def all_keys(layouts: Iterable[Layout]) -> list[str]:
    """The keys of all of them, each where it comes first."""
    return list(dict.fromkeys(key for layout in layouts for key in layout.keys))


def classes_of(layouts: Sequence[Layout], layout_of_rank: np.ndarray) -> list[Members]:
    """The keys of all layouts by the ranks that have them, by lowest rank: so what many layouts share is there once."""
    if len(layouts) == 1:
        return [Members(layout=layouts[0], ranks=np.arange(len(layout_of_rank)))]
    lenient = frozenset[str]().union(*(layout.lenient for layout in layouts))
    owners: dict[tuple[str, _Head | None, int], list[int]] = {}
    spreads: dict[tuple[_Mesh, _Rule | _Listed], int] = {}
    for number, layout in enumerate(layouts):
        said = layout.said
        known = [spreads.setdefault(_with_mesh(rule, said.meshes), len(spreads)) for rule in said.spreads]
        known.append(WHOLE)  # rule -1
        for key, head, rule in zip(said.keys, said.heads, said.rules, strict=True):
            owners.setdefault((key, head, known[rule]), []).append(number)
    classes: dict[tuple[int, ...], list[tuple[str, _Head | None, int]]] = {}
    for atom, having in owners.items():
        classes.setdefault(tuple(having), []).append(atom)
    rules = list(spreads)
    found = []
    for numbers, atoms in classes.items():
        ranks = np.flatnonzero(np.isin(layout_of_rank, numbers))
        found.append(Members(layout=_made_of(atoms, rules, layouts[numbers[-1]].paths, lenient), ranks=ranks))
    return sorted(found, key=lambda each: int(each.ranks[0]))


def _with_mesh(rule: _Rule | _Listed, meshes: list[_Mesh]) -> tuple[_Mesh, _Rule | _Listed]:
    """What tells rules of different layouts apart: the mesh itself, whatever its number."""
    return (_NOWHERE, rule) if isinstance(rule, _Listed) else (meshes[rule.mesh], _Rule(0, rule.splits))


def _made_of(
    atoms: list[tuple[str, _Head | None, int]],
    rules: list[tuple[_Mesh, _Rule | _Listed]],
    paths: dict[str, Path] | None,
    lenient: frozenset[str],
) -> Layout:
    """The layout of these keys; the rules that they have are numbered anew."""
    meshes: dict[_Mesh, int] = {}
    used: dict[int, int] = {}
    for _, _, rule in atoms:
        if rule != WHOLE:
            used.setdefault(rule, len(used))
    keys = [key for key, _, _ in atoms]
    mine = None if paths is None else {key: paths[key] for key in keys if key in paths}
    return _layout(
        keys,
        [head for _, head, _ in atoms],
        [used.get(rule, WHOLE) for _, _, rule in atoms],
        spreads=[
            said if isinstance(said, _Listed) else _Rule(meshes.setdefault(mesh, len(meshes)), said.splits)
            for mesh, said in (rules[rule] for rule in used)
        ],
        meshes=meshes,
        paths=mine,
        lenient=lenient,
    )


def layout_of(local: LocalLeaves, paths: dict[str, Path] | None) -> Layout:
    """The layout of these leaves; of those whose pieces follow no rule, the boxes are listed."""
    rules: dict[tuple[int, tuple[tuple[Split, ...], ...]] | _Listed, int] = {}
    meshes: dict[_Mesh, int] = {}
    known: dict[int, int] = {}  # the same by identity, which is looked up sooner
    numbers = [WHOLE] * len(local.spreads)
    for which, spread in enumerate(local.spreads):
        if isinstance(spread, Spread):
            mesh = known.get(id(spread.mesh))
            if mesh is None:
                mesh = known[id(spread.mesh)] = meshes.setdefault(_mesh_of(spread), len(meshes))
            numbers[which] = rules.setdefault((mesh, spread.splits), len(rules))
        elif spread == UNKNOWN:
            boxes = [piece.box for piece in local.pieces[local.columns.keys[which]].pieces]
            listed = _Listed(tuple(box.offsets for box in boxes), tuple(box.lengths for box in boxes))
            numbers[which] = rules.setdefault(listed, len(rules))
    return _layout(
        local.columns.keys,
        [None if head is None else _head_text(head) for head in local.columns.heads],
        numbers,
        spreads=[said if isinstance(said, _Listed) else _Rule(*said) for said in rules],
        meshes=meshes,
        paths=paths,
        lenient=local.columns.lenient,
    )


def described(
    keys: list[str],
    heads: Sequence[TensorHead | None],
    rules: list[int],
    *,
    spreads: Sequence[tuple[int, tuple[tuple[Split, ...], ...]]] = (),
    meshes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = (),
    paths: dict[str, Path] | None = None,
) -> Layout:
    """The layout of these keys: each has a rule, which is WHOLE or the number of a spread (mesh number and splits).

    A mesh is its shape and the ranks in it, row by row.
    """
    texts = [None if head is None else _head_text(head) for head in heads]
    stored = [_Mesh(shape, ranks) for shape, ranks in meshes]
    return _layout(keys, texts, rules, spreads=[_Rule(*said) for said in spreads], meshes=stored, paths=paths)


def _layout(
    keys: list[str],
    heads: list[_Head | None],
    rules: list[int],
    *,
    spreads: list[_Rule | _Listed],
    meshes: Iterable[_Mesh],
    paths: dict[str, Path] | None,
    lenient: frozenset[str] = frozenset(),
) -> Layout:
    text = _Text(keys, heads, rules, spreads, list(meshes), _steps(paths, keys), sorted(lenient.intersection(keys)))
    return Layout(text=_encode(text), paths=paths)


def _mesh_of(spread: Spread) -> _Mesh:
    ranks = spread.mesh.mesh
    return _Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))


def _head_text(head: TensorHead) -> _Head:
    properties = head.properties
    return DTYPE_NAMES[properties.dtype], head.size, properties.requires_grad, head.alias_of, head.kind


def _head_of(said: _Head) -> TensorHead:
    dtype, size, requires_grad, alias_of, kind = said
    return TensorHead(properties_of(torch_dtype(dtype), requires_grad), torch.Size(size), alias_of, kind)


def _steps(paths: Mapping[str, Path] | None, keys: list[str]) -> list[object]:
    """The paths of the keys with the types of their steps: an int key equals its text, a tuple's place a list's."""
    if paths is None:
        return []
    return [[step if type(step) is str else _step(step) for step in paths.get(key, ())] for key in keys]


def _step(step: object) -> object:
    if isinstance(step, TypedKey):
        return ["key", type(step.value).__qualname__, repr(step.value)]
    return ["tuple" if isinstance(step, TupleIndex) else "list", int(step)]  # type: ignore[call-overload]


_Kind = tuple[int, int, tuple[int, ...]]  # class, rule, size


class LayoutPlan(JointPlan):
    """Who writes what, from the layouts of all ranks.

    Args:
        classes: what each rank has, as the classes that it is a member of.
        keys: all keys in the order that the metadata has them in.
        job_ranks: the number that meshes have for each rank.
        to_lowest_rank: what several ranks hold is written by the lowest of them.
        hosts: the number of each rank's host, where that makes a difference.

    Raises:
        InvalidStateError: the boxes of a tensor do not tile it exactly.
        RankDisagreementError: layouts say different things of one key.
    """

    def __init__(
        self,
        classes: Sequence[Members],
        keys: list[str],
        job_ranks: np.ndarray,
        *,
        to_lowest_rank: bool = False,
        hosts: np.ndarray | None = None,
    ) -> None:
        self.classes = classes
        self.job_ranks = job_ranks
        self._rows: dict[_Kind, HeldRows] = {}
        self._holdings: dict[tuple[_Kind, ...], Holding] = {}
        heads, holdings = self._gather(keys)
        lenient = frozenset[str]().union(*(members.layout.lenient for members in classes))
        super().__init__(heads, holdings, len(job_ranks), to_lowest_rank=to_lowest_rank, hosts=hosts, lenient=lenient)

    def _gather(self, keys: list[str]) -> tuple[dict[str, TensorHead | None], list[Holding]]:
        kinds: dict[str, list[_Kind]] = {}

        def said() -> Iterator[tuple[int, str, TensorHead | None, bool]]:
            for number, members in enumerate(self.classes):
                rank, layout = int(members.ranks[0]), members.layout
                for key, head, rule in zip(layout.keys, layout.heads, layout.rules, strict=True):
                    kind = (number, rule, () if head is None else tuple(head.size))
                    kinds.setdefault(key, []).append(kind)
                    yield rank, key, head, len(self._held_rows(kind).rank) > 0

        heads = agreed_heads(said())
        return {key: heads[key] for key in keys}, [self._holding(tuple(kinds[key])) for key in keys]

    def _held_rows(self, kind: _Kind) -> HeldRows:
        if kind not in self._rows:
            number, rule, size = kind
            members = self.classes[number].ranks
            found = self.classes[number].layout.boxes(rule, size, self.job_ranks[members])
            is_everyone = len(found.member) == len(members) and bool((np.diff(found.member) == 1).all())
            rank = members if is_everyone else members[found.member]
            self._rows[kind] = HeldRows(rank=rank, lo=found.lo, length=found.length)
        return self._rows[kind]

    def _holding(self, kinds: tuple[_Kind, ...]) -> Holding:
        if kinds not in self._holdings:
            self._holdings[kinds] = holding_of([self._held_rows(kind) for kind in kinds])
        return self._holdings[kinds]

    def row_digests(self) -> np.ndarray:
        """What ``rows_digest`` makes of each rank's local rows, if they are as its layout says."""
        digests = np.zeros(self.ranks, dtype=np.uint64)
        factors: dict[int, int] = {}
        parts: dict[int, HeldRows] = {}
        for factor, holding in zip(name_words(self.keys).tolist(), self.holdings, strict=True):
            for part in holding.parts:
                parts[id(part)] = part
                factors[id(part)] = (factors.get(id(part), 0) + factor) % (1 << 64)
        for number, part in parts.items():
            np.add.at(digests, part.rank, box_words(part.lo, part.length) * np.uint64(factors[number]))
        return digests

    def changed_heads(self, rank: int) -> dict[str, TensorHead | None]:
        """What all ranks together say of the keys of ``rank``, where that is not what it says itself."""
        changed: dict[str, TensorHead | None] = {}
        for number in self.classes_of_rank[rank]:
            changed.update(self._changed_in_class[number])
        return changed

    @cached_property
    def classes_of_rank(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for number, members in enumerate(self.classes):
            for rank in members.ranks.tolist():
                found[rank].append(number)
        return found

    @cached_property
    def _changed_in_class(self) -> list[dict[str, TensorHead | None]]:
        return [
            {
                key: together
                for key, head in zip(members.layout.keys, members.layout.heads, strict=True)
                if (together := self.heads[self.numbers[key]]) is not head and together != head
            }
            for members in self.classes
        ]

    def rows_of(self, rank: int) -> WriteColumns:
        """All that ``rank`` holds, by the names of its keys."""
        found: dict[str, tuple[TensorHead | None, int, HeldRows]] = {}
        for number in self.classes_of_rank[rank]:
            layout = self.classes[number].layout
            for key, head, rule in zip(layout.keys, layout.heads, layout.rules, strict=True):
                size = () if head is None else tuple(head.size)
                found[key] = head, rule, self._held_rows((number, rule, size))
        names = sorted(found)
        lows: list[list[int]] = []
        lengths: list[list[int]] = []
        owners: list[int] = []
        for which, name in enumerate(names):
            rows = found[name][2]
            start, stop = np.searchsorted(rows.rank, [rank, rank + 1]).tolist()
            lows += rows.lo[start:stop].tolist()
            lengths += rows.length[start:stop].tolist()
            owners += [which] * (stop - start)
        owner = np.array(owners, dtype=np.int64)
        is_shard = np.array([found[name][1] != WHOLE for name in names], dtype=bool)
        return WriteColumns(
            keys=names,
            heads=[found[name][0] for name in names],
            key=owner,
            lo=padded(lows, fill=0),
            length=padded(lengths, fill=1),
            hint=np.zeros(len(owner), dtype=np.int64),
            is_shard=is_shard[owner],
            lenient=self.lenient.intersection(names),
        )
