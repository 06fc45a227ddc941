"""What the rules of a mapping mean for the keys and shapes of a state: which tensors belong together, and every fault.

All follows from the inside, so it is the same for a load and for a save. The time does not grow with the number of
rules: keys that differ in their numbers only are alike, and what rules may match one of them is found out once. Nor
is anything computed twice for tensors of the same shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast._mapping.relations import DoesNotFit, Relation, Size, relation_of
from holdfast._mapping.rules import Drop, Move, Rule, Template, Tie, expression_of, places_of

Shapes = Mapping[str, Sequence[int] | None]
"""Keys with their shapes, or None for what is no tensor."""

_TOGETHER = (
    "have both on this rank; where stages of a pipeline have one each, give the mapping to holdfast convert instead"
)
# So many numbers that a list lacks are told one by one.
_TOGETHER = (
    "have both on this rank; where stages of a pipeline have one each, give the mapping to holdfast convert instead"
)
_SHOWN_GAPS = 8
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way in which a mapping does not fit: a ``key``, ``inside`` or ``outside``, and what is wrong with it.

    ``kind`` is "unclaimed" (no rule has it), "twice" (more than one has), "missing" (a part of a whole is), "shape",
    "dtype", "kind" (it is no tensor) or "tie" (the other one is missing, or not equal).
    """

    key: str
    side: str
    kind: str
    problem: str

    def __str__(self) -> str:
        return f"{self.key!r} {self.problem}"


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that belong together, outside and inside, and how."""

    outside: tuple[str, ...]
    inside: tuple[str, ...]
    relation: Relation


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """What rules mean for a state: ``same`` leads from the outside key of what only has another name to the inside.

    ``ties`` lead from a key that has no tensor outside to the key that it is tied to; ``dropped`` have none either.
    """

    same: dict[str, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def outside(self) -> dict[str, Size | None]:
        """The keys outside; with the shapes of those that are made by operations."""
        made = {key: size for each in self.groups for key, size in zip(each.outside, each.relation.sizes, strict=True)}
        return {**dict.fromkeys(self.same), **made}


class Matcher:
    """Finds the patterns that a key fits."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._literal: dict[str, list[int]] = {}
        self._open: list[tuple[int, re.Pattern[str], re.Pattern[str]]] = []
        self._alike: dict[str, list[tuple[int, re.Pattern[str]]]] = {}
        for number, pattern in enumerate(patterns):
            if places_of(pattern):
                self._open.append((number, expression_of(pattern), expression_of(pattern, any_number=True)))
            else:
                self._literal.setdefault(pattern, []).append(number)

    def __bool__(self) -> bool:
        return bool(self._literal or self._open)

    def find(self, key: str) -> list[tuple[int, tuple[str, ...]]]:
        """The numbers of the patterns that ``key`` fits, each with what its names stand for."""
        found: list[tuple[int, tuple[str, ...]]] = []
        if key in self._literal:
            found = [(number, ()) for number in self._literal[key]]
        like = _NUMBER.sub("0", key)
        candidates = self._alike.get(like)
        if candidates is None:
            candidates = [(number, exact) for number, exact, loose in self._open if loose.fullmatch(like)]
            self._alike[like] = candidates
        for number, exact in candidates:
            match = exact.fullmatch(key)
            if match is not None:
                found.append((number, match.groups()))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A Move with what fills its patterns: from the names of its insides, in order, without the number of a list."""

    move: Move
    names: tuple[str, ...]
    outside: tuple[Template, ...]
    inside: tuple[Template, ...]
    number: str | None
    lists_inside: bool
    is_simple: bool

    @classmethod
    def of(cls, move: Move) -> _Compiled:
        names = [name for name, _ in places_of(move.insides[0])]
        names = [name for name in dict.fromkeys(names) if name != move.number]
        order = [*names, *([] if move.number is None else [move.number])]
        outside, inside = ([Template(each, order) for each in side] for side in (move.outsides, move.insides))
        is_simple = len(outside) == len(inside) == 1 and not move.operations
        lists_inside = any(name == move.number for name, _ in places_of(move.insides[0]))
        return cls(move, tuple(names), tuple(outside), tuple(inside), move.number, lists_inside, is_simple)

    def outside_keys(self, texts: tuple[str, ...], numbers: int) -> tuple[str, ...]:
        return self._keys(self.outside, texts, numbers)

    def inside_keys(self, texts: tuple[str, ...], numbers: int) -> tuple[str, ...]:
        return self._keys(self.inside, texts, numbers)

    def _keys(self, templates: Iterable[Template], texts: tuple[str, ...], numbers: int) -> tuple[str, ...]:
        if self.number is None:
            return tuple([template.key(texts) for template in templates])
        each = [(*texts, str(number)) for number in range(numbers)]
        return tuple([template.key(one) for template in templates for one in each])


_Texts = tuple[str, ...]


def match(rules: Sequence[Rule], inside: Shapes, *, strict: bool = False) -> Matched:
    """What ``rules`` mean for the keys ``inside``; with ``strict``, keys that no rule has are faults."""
    return _Matching(rules, inside, strict).matched


class _Matching:
    """One use of rules for one state."""

    def __init__(self, rules: Sequence[Rule], inside: Shapes, strict: bool) -> None:
        self.matched = Matched()
        self._inside = inside
        self._owners: dict[str, str] = {}
        self._members: dict[tuple[int, _Texts], set[int]] = {}
        self._relations: dict[tuple[int, tuple[Size, ...]], Relation | str] = {}
        self._moves = [_Compiled.of(rule) for rule in rules if isinstance(rule, Move)]
        self._patterns: list[tuple[int, int | Tie | Drop, tuple[str, ...]]] = []
        patterns: list[str] = []
        moves = 0
        for rule in rules:
            if isinstance(rule, Move):
                for pattern in rule.insides:
                    self._patterns.append((0, moves, _names(pattern)))
                    patterns.append(pattern)
                moves += 1
            elif isinstance(rule, Tie) or (isinstance(rule, Drop) and rule.inside):
                self._patterns.append((1, rule, _names(rule.inside)))
                patterns.append(rule.inside)
        self._matcher = Matcher(patterns)
        for key in inside:
            self._place(key, strict)
        for (number, texts), numbers in self._members.items():
            self._make(number, texts, numbers)

    def _fault(self, key: str, kind: str, problem: str, side: str = "inside") -> None:
        self.matched.faults.append(Fault(key=key, side=side, kind=kind, problem=problem))

    def _place(self, key: str, strict: bool) -> None:
        """Find out what ``key`` belongs to."""
        found = self._matcher.find(key)
        if not found:
            if strict:
                self._fault(key, "unclaimed", "is named by no rule; add one")
            else:
                self._same(key, key)
            return
        if len(found) > 1:
            # A tie or a drop is an exception from a rule that moves more than this key.
            special = [each for each in found if self._patterns[each[0]][0]]
            if len(special or found) > 1:
                self._fault(key, "twice", "is named by more than one rule; give it one")
                return
            found = special
        [(pattern, groups)] = found
        _, rule, names = self._patterns[pattern]
        if isinstance(rule, Drop):
            self.matched.dropped.append(key)
        elif isinstance(rule, Tie):
            self._tie(key, Template(rule.same_as, names).key(groups))
        else:
            self._move(key, rule, names, groups)

    def _tie(self, key: str, other: str) -> None:
        if other == key or other not in self._inside:
            self._fault(key, "tie", f"is tied to {other!r}, which is not there; {_TOGETHER}")
        elif self._inside[other] is None or self._inside[key] is None:
            self._fault(key, "kind", f"is tied to {other!r}, and one of them is no tensor; only tensors are tied")
        elif tuple(self._inside[other] or ()) != tuple(self._inside[key] or ()):
            self._fault(key, "tie", f"has another shape than {other!r}, to which it is tied")
        else:
            self.matched.ties[key] = other

    def _move(self, key: str, number: int, names: tuple[str, ...], groups: tuple[str, ...]) -> None:
        compiled = self._moves[number]
        if compiled.is_simple and names == compiled.names:
            self._same(compiled.outside[0].key(groups), key)
            return
        texts = dict(zip(names, groups, strict=True))
        index = texts.get(compiled.number or "", "0")
        members = self._members.setdefault((number, tuple([texts[name] for name in compiled.names])), set())
        members.add(int(index))

    def _same(self, outside: str, inside: str) -> None:
        if self._own(outside, inside):
            self.matched.same[outside] = inside

    def _own(self, outside: str, inside: str) -> bool:
        """Whether no other tensor has the name ``outside``; from now on it is that of ``inside``."""
        owner = self._owners.setdefault(outside, inside)
        if owner is not inside:
            self._fault(outside, "twice", f"would be the name of {owner!r} and of {inside!r}; change a rule", "outside")
        return owner is inside

    def _make(self, number: int, texts: _Texts, numbers: set[int]) -> None:
        """Make the group of the rule ``number`` whose names stand for ``texts``."""
        compiled, length = self._moves[number], max(numbers) + 1
        if compiled.lists_inside and length > len(numbers):
            gaps = [each for each in range(len(numbers) + _SHOWN_GAPS) if each < length and each not in numbers]
            more = length - len(numbers) - len(gaps)
            said = f", like {more} more of its list" if more else ""
            for each in gaps:
                self._fault(
                    compiled.inside[0].key((*texts, str(each))), "missing", f"is missing{said}; have the list whole"
                )
            return
        keys = compiled.inside_keys(texts, length if compiled.lists_inside else 1)
        missing = [key for key in keys if key not in self._inside]
        if missing:
            there = next(key for key in keys if key in self._inside)
            for key in missing:
                self._fault(key, "missing", f"is missing, and {there!r} cannot be moved without it; {_TOGETHER}")
            return
        shapes = [self._inside[key] for key in keys]
        others = [key for key, shape in zip(keys, shapes, strict=True) if shape is None]
        for key in others:
            self._fault(key, "kind", "is no tensor, and a rule with operations is for tensors")
        if others:
            return
        sizes = tuple([tuple(shape) for shape in shapes if shape is not None])
        relation = self._relations.get((number, sizes))
        if relation is None:
            relation = self._relations[number, sizes] = _related(compiled.move, sizes)
        if isinstance(relation, str):
            self._fault(keys[0], "shape", relation)
            return
        outside = compiled.outside_keys(texts, relation.numbers)
        if len({*outside}) < len(outside):
            self._fault(keys[0], "twice", "and others would be two tensors of one name outside; change the rule")
            return
        if all([self._own(key, keys[0]) for key in outside]):
            self.matched.groups.append(Group(outside, keys, relation))


def _names(pattern: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name, _ in places_of(pattern)))


def _related(move: Move, sizes: tuple[Size, ...]) -> Relation | str:
    try:
        return relation_of(move, sizes)
    except DoesNotFit as problem:
        others = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
        return f"does not fit the rule for {move.inside!r}: tensors{others and ', it' + others + ','} {problem}"


def outside_faults(matched: Matched, outside: Shapes, inside: Shapes, *, dropped: Matcher) -> list[Fault]:
    """How the keys ``outside`` differ from those that the rules would have; ``dropped`` finds those that may."""
    wanted = matched.outside()
    found: list[Fault] = []
    for key, size in wanted.items():
        if key not in outside:
            found.append(Fault(key=key, side="outside", kind="missing", problem="is missing"))
            continue
        due = size if key not in matched.same else inside[matched.same[key]]
        its = outside[key]
        if its is not None and due is not None and tuple(its) != tuple(due):
            problem = f"has shape {list(its)}, but {list(due)} belongs to what is inside"
            found.append(Fault(key=key, side="outside", kind="shape", problem=problem))
    more = [key for key in outside if key not in wanted and not dropped.find(key)]
    found += [
        Fault(key=key, side="outside", kind="unclaimed", problem="has no place inside; drop it by a rule")
        for key in more
    ]
    return found
