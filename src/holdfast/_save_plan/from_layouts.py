"""Layouts: all that defines what the ranks of a job hold, said once for all ranks of which it is true; and the plan
made of them.

A layout has the keys, what they are, the rule of each, and their paths. A rule says that a leaf is whole, or how it is
spread over a mesh, or, where only the rank itself knows, it lists the boxes that this rank holds. The ``text`` of a
layout is made in one way, so that ranks have the same layout exactly when the 128-bit fingerprints of their texts are
the same. What a rank holds follows from layout and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import xxhash

from holdfast._plan.coverage import HeldRows, Holding, boxes_on_mesh, holding_of
from holdfast._save_plan.plans import UNKNOWN, LocalLeaves, agreed_heads, properties_of
from holdfast._save_plan.together import JointPlan, joint_plan
from holdfast._state.nested import TupleIndex, TypedKey
from holdfast._state.pieces import Spread
from holdfast._state.tensors import DTYPE_NAMES, torch_dtype
from holdfast._values.box import MeshSplit
from holdfast._values.digest import box_words, name_words
from holdfast._values.lazy import cached_property
from holdfast.metadata import Path
from holdfast.planner import TensorHead, WriteColumns, padded

_Head = tuple[str, tuple[int, ...], bool, str | None, str | None]

WHOLE = -1
"""The rule of a key that every rank has whole."""


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


_NOWHERE = Mesh((), ())


class Rule(msgspec.Struct, frozen=True, array_like=True, tag="spread"):
    mesh: int
    splits: tuple[tuple[MeshSplit, ...], ...]


class Listed(msgspec.Struct, frozen=True, array_like=True, tag="listed"):
    lo: tuple[tuple[int, ...], ...]
    length: tuple[tuple[int, ...], ...]


class _Text(msgspec.Struct, frozen=True, array_like=True):
    keys: list[str]
    heads: list[_Head | None]
    rules: list[int]
    spreads: list[Rule | Listed]
    meshes: list[Mesh]
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
    def heads(self) -> list[TensorHead | None]:
        """What every key is."""
        heads: list[TensorHead | None] = []
        for said in self.said.heads:
            if said is None:
                heads.append(None)
            else:
                dtype, size, requires_grad, alias_of, kind = said
                properties = properties_of(torch_dtype(dtype), requires_grad)
                heads.append(TensorHead(properties, torch.Size(size), alias_of, kind))
        return heads

    def held(self, rule: int, size: tuple[int, ...], ranks: np.ndarray, names: np.ndarray) -> HeldRows:
        """What ``ranks``, which have this layout, hold of a tensor of ``size`` under that rule.

        ``names`` are their numbers in meshes.
        """
        count = len(ranks)
        if rule == WHOLE:
            lo, length = np.zeros((count, len(size)), dtype=np.int64), np.empty((count, len(size)), dtype=np.int64)
            length[:] = size
            return HeldRows(rank=ranks, lo=lo, length=length)
        spread = self.said.spreads[rule]
        if isinstance(spread, Listed):
            lo = np.array(spread.lo, dtype=np.int64).reshape(-1, len(size))
            length = np.array(spread.length, dtype=np.int64).reshape(-1, len(size))
            everyones = np.tile(lo, (count, 1)), np.tile(length, (count, 1))
            return HeldRows(rank=np.repeat(ranks, len(lo)), lo=everyones[0], length=everyones[1])
        mesh = self.said.meshes[spread.mesh]
        found = boxes_on_mesh(size, mesh.shape, spread.splits)
        members = np.array(mesh.ranks, dtype=np.int64)
        place = np.full(max(int(members.max(initial=-1)), int(names.max(initial=-1))) + 1, -1, dtype=np.int64)
        place[names] = np.arange(count)
        holder = place[members[found.rank]]
        order = np.argsort(holder, kind="stable")
        order = order[np.searchsorted(holder[order], 0) :]
        holder = holder[order]
        is_everyone = len(holder) == count and bool((np.diff(holder) == 1).all())  # then they share one array
        return HeldRows(rank=ranks if is_everyone else ranks[holder], lo=found.lo[order], length=found.length[order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """Ranks, ascending, and the part of their layouts that all of them have and nobody else has like that."""

    layout: Layout
    ranks: np.ndarray


def all_keys(layouts: Iterable[Layout]) -> list[str]:
    """The keys of all of them, each where it comes first."""
    keys: dict[str, None] = {}
    for layout in layouts:
        keys.update(dict.fromkeys(layout.said.keys))
    return list(keys)


def classes_of(layouts: Sequence[Layout], layout_of_rank: np.ndarray) -> list[Members]:
    """The keys of all layouts by the ranks that have them, by lowest rank: so what many layouts share is there once."""
    if len(layouts) == 1:
        return [Members(layout=layouts[0], ranks=np.arange(len(layout_of_rank)))]
    lenient = frozenset[str]().union(*(layout.said.lenient for layout in layouts))
    owners: dict[tuple[str, _Head | None, int], list[int]] = {}
    spreads: dict[tuple[Mesh, Rule | Listed], int] = {}
    for number, layout in enumerate(layouts):
        said = layout.said
        known: list[int] = []
        for rule in said.spreads:  # the mesh itself tells rules of different layouts apart, not its number
            mesh = _NOWHERE if isinstance(rule, Listed) else said.meshes[rule.mesh]
            place = mesh, rule if isinstance(rule, Listed) else Rule(0, rule.splits)
            known.append(spreads.setdefault(place, len(spreads)))
        known.append(WHOLE)  # rule -1
        for atom in zip(said.keys, said.heads, map(known.__getitem__, said.rules), strict=True):
            owners.setdefault(atom, []).append(number)
    classes: dict[tuple[int, ...], list[tuple[str, _Head | None, int]]] = {}
    for atom, having in owners.items():
        classes.setdefault(tuple(having), []).append(atom)
    rules = list(spreads)
    found = []
    for numbers, atoms in classes.items():
        ranks = np.flatnonzero(np.isin(layout_of_rank, numbers))
        found.append(Members(layout=_made_of(atoms, rules, layouts[numbers[-1]].paths, lenient), ranks=ranks))
    return sorted(found, key=lambda each: int(each.ranks[0]))


def _made_of(
    atoms: list[tuple[str, _Head | None, int]],
    rules: list[tuple[Mesh, Rule | Listed]],
    paths: dict[str, Path] | None,
    lenient: frozenset[str],
) -> Layout:
    """The layout of these keys; the rules that they have are numbered anew."""
    meshes: dict[Mesh, int] = {}
    used: dict[int, int] = {}
    for _, _, rule in atoms:
        if rule != WHOLE:
            used.setdefault(rule, len(used))
    keys = [key for key, _, _ in atoms]
    mine = None if paths is None else {key: paths[key] for key in keys if key in paths}
    return described(
        keys,
        [head for _, head, _ in atoms],
        [used.get(rule, WHOLE) for _, _, rule in atoms],
        spreads=[
            said if isinstance(said, Listed) else Rule(meshes.setdefault(mesh, len(meshes)), said.splits)
            for mesh, said in (rules[rule] for rule in used)
        ],
        meshes=meshes,
        paths=mine,
        lenient=lenient,
    )


def layout_of(local: LocalLeaves, paths: dict[str, Path] | None) -> Layout:
    """The layout of these leaves; of those whose pieces follow no rule, the boxes are listed."""
    rules: dict[tuple[int, tuple[tuple[MeshSplit, ...], ...]] | Listed, int] = {}
    meshes: dict[Mesh, int] = {}
    known: dict[int, int] = {}  # the same by identity, which is looked up sooner
    numbers = [WHOLE] * len(local.spreads)
    for which, spread in enumerate(local.spreads):
        if isinstance(spread, Spread):
            mesh = known.get(id(spread.mesh))
            if mesh is None:
                ranks = spread.mesh.mesh
                named = Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
                mesh = known[id(spread.mesh)] = meshes.setdefault(named, len(meshes))
            numbers[which] = rules.setdefault((mesh, spread.splits), len(rules))
        elif spread == UNKNOWN:
            boxes = [piece.box for piece in local.pieces[local.columns.keys[which]].pieces]
            listed = Listed(tuple(box.offsets for box in boxes), tuple(box.lengths for box in boxes))
            numbers[which] = rules.setdefault(listed, len(rules))
    return described(
        local.columns.keys,
        [None if head is None else head_text(head) for head in local.columns.heads],
        numbers,
        spreads=[said if isinstance(said, Listed) else Rule(*said) for said in rules],
        meshes=meshes,
        paths=paths,
        lenient=local.columns.lenient,
    )


def head_text(head: TensorHead) -> _Head:
    properties = head.properties
    return DTYPE_NAMES[properties.dtype], head.size, properties.requires_grad, head.alias_of, head.kind


def described(
    keys: list[str],
    heads: list[_Head | None],
    rules: list[int],
    *,
    spreads: Sequence[Rule | Listed] = (),
    meshes: Iterable[Mesh] = (),
    paths: dict[str, Path] | None = None,
    lenient: frozenset[str] = frozenset(),
) -> Layout:
    """The layout of these keys: the rule of each is WHOLE or the number of a spread.

    The text has the types of the steps of paths: an int key equals its text, a tuple's place a list's.
    """
    steps: list[object] = []
    for key in keys if paths is not None else ():
        steps.append([step if type(step) is str else _step(step) for step in (paths or {}).get(key, ())])
    text = _Text(keys, heads, rules, list(spreads), list(meshes), steps, sorted(lenient.intersection(keys)))
    return Layout(text=_encode(text), paths=paths)


def _step(step: object) -> object:
    if isinstance(step, TypedKey):
        return ["key", type(step.value).__qualname__, repr(step.value)]
    return ["tuple" if isinstance(step, TupleIndex) else "list", int(step)]  # type: ignore[call-overload]


_Kind = tuple[int, int, tuple[int, ...]]  # class, rule, size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutRows:
    """What every rank holds, by the classes that it is a member of.

    ``kinds`` has the kind of each key of each class, ``held`` the rows of each kind, which keys of one kind share.
    """

    classes: Sequence[Members]
    kinds: list[list[_Kind]]
    held: dict[_Kind, HeldRows]
    classes_of_rank: list[list[int]]
    lenient: frozenset[str]

    def of(self, rank: int) -> WriteColumns:
        """All that ``rank`` holds, by the names of its keys."""
        found: dict[str, tuple[TensorHead | None, _Kind]] = {}
        for number in self.classes_of_rank[rank]:
            layout = self.classes[number].layout
            for key, head, kind in zip(layout.said.keys, layout.heads, self.kinds[number], strict=True):
                found[key] = head, kind
        names = sorted(found)
        lows: list[list[int]] = []
        lengths: list[list[int]] = []
        owners: list[int] = []
        for which, name in enumerate(names):
            rows = self.held[found[name][1]]
            start, stop = np.searchsorted(rows.rank, [rank, rank + 1]).tolist()
            lows += rows.lo[start:stop].tolist()
            lengths += rows.length[start:stop].tolist()
            owners += [which] * (stop - start)
        owner = np.array(owners, dtype=np.int64)
        is_shard = np.array([found[name][1][1] != WHOLE for name in names], dtype=bool)
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


def layout_rows(classes: Sequence[Members], job_ranks: np.ndarray) -> LayoutRows:
    """What all ranks hold; ``job_ranks`` has the number that meshes have for each."""
    kinds: list[list[_Kind]] = []
    held: dict[_Kind, HeldRows] = {}
    classes_of_rank: list[list[int]] = [[] for _ in job_ranks]
    lenient: set[str] = set()
    for number, members in enumerate(classes):
        for rank in members.ranks.tolist():
            classes_of_rank[rank].append(number)
        said, names = members.layout.said, job_ranks[members.ranks]
        lenient.update(said.lenient)
        kinds.append([])
        for head, rule in zip(said.heads, said.rules, strict=True):
            kind = number, rule, () if head is None else head[1]
            kinds[-1].append(kind)
            if kind not in held:
                held[kind] = members.layout.held(rule, kind[2], members.ranks, names)
    return LayoutRows(
        classes=classes, kinds=kinds, held=held, classes_of_rank=classes_of_rank, lenient=frozenset(lenient)
    )


def plan_layouts(rows: LayoutRows, keys: list[str], *, to_lowest_rank: bool = False) -> JointPlan:
    """Who writes what of these rows; ``keys`` are all keys in the order that the metadata has them in.

    InvalidStateError where the boxes of a tensor do not tile it exactly, RankDisagreementError where layouts say
    different things of one key.
    """
    said: list[tuple[int, str, TensorHead | None, bool]] = []
    by_key: dict[str, list[_Kind]] = {key: [] for key in keys}
    for members, kinds in zip(rows.classes, rows.kinds, strict=True):
        rank, layout = int(members.ranks[0]), members.layout
        for key, head, kind in zip(layout.said.keys, layout.heads, kinds, strict=True):
            said.append((rank, key, head, len(rows.held[kind].rank) > 0))
            by_key[key].append(kind)
    heads = agreed_heads(said)
    known: dict[tuple[_Kind, ...], Holding] = {}
    holdings = []
    for key in keys:
        together = tuple(by_key[key])
        if together not in known:
            known[together] = holding_of([rows.held[kind] for kind in together])
        holdings.append(known[together])
    return joint_plan(
        {key: heads[key] for key in keys},
        holdings,
        len(rows.classes_of_rank),
        to_lowest_rank=to_lowest_rank,
        lenient=rows.lenient,
    )


def row_digests(plan: JointPlan) -> np.ndarray:
    """What ``rows_digest`` makes of each rank's local rows, if they are as its layout says."""
    digests = np.zeros(plan.ranks, dtype=np.uint64)
    factors: dict[int, tuple[HeldRows, int]] = {}
    for factor, holding in zip(name_words(plan.keys).tolist(), plan.holdings, strict=True):
        for part in holding.parts:
            _, before = factors.get(id(part), (part, 0))
            factors[id(part)] = part, (before + factor) % (1 << 64)
    for part, factor in factors.values():
        np.add.at(digests, part.rank, box_words(part.lo, part.length) * np.uint64(factor))
    return digests
