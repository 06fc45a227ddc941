"""The rules of a mapping: how the tensors of files (outside) and those of a state (inside) belong together.

One list of rules serves both directions. A rule is a frozen value, and a mapping is JSON as well as Python: there is
nothing in it but names, numbers and the operations below, all of which only say where elements go. A rule that exists
was checked, and is bounded. What rules mean for the keys of a state is found out elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from holdfast._state.tensors import TORCH_DTYPES

_MAX_PATTERN = 1024
_MAX_PATTERNS = 4096
_MAX_OPERATIONS = 16
_MAX_NUMBER = 1 << 31

_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]{0,31})(\.\.\.)?\}")


class _Operation(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="operation",
    tag=str.lower,
):
    """What is done in dimension ``dim``."""

    dim: int = 0

    def __post_init__(self) -> None:
        _check_dims(self.dim)


class _Parted(_Operation, frozen=True):
    """What both have that cut a tensor: in dimension ``dim`` it has ``parts`` of lengths in this proportion."""

    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not 0 < part < _MAX_NUMBER for part in self.parts):
            raise ValueError(f"the parts of a {type(self).__name__} are positive numbers, not {self.parts}")


class Concat(_Parted, frozen=True):
    """Several tensors outside are one inside, one after the other in dimension ``dim``.

    ``parts`` says in which proportion they share it, as (4, 1, 1) for queries, keys and values; by default they are
    equally long.
    """


class Split(_Parted, frozen=True):
    """One tensor outside is several inside, which lie in it one after the other in dimension ``dim``.

    How long each is, the tensors inside say. Only where there are none yet, as in a conversion, ``parts`` has to.
    """


class Stack(_Operation, frozen=True):
    """The tensors of a numbered list outside are one inside, which has dimension ``dim`` for their number."""


class Unstack(_Operation, frozen=True):
    """One tensor outside is a numbered list of tensors inside: what it has at each index of dimension ``dim``."""


class Transpose(_Operation, frozen=True):
    """The dimensions ``dim`` and ``other`` change places."""

    other: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dims(self.other)


class _Order(_Operation, frozen=True):
    """What both orders have: in dimension ``dim`` there are equal ``groups``, and equal ``parts`` in each.

    With one group for each head and two parts, these are the row orders of RoPE: in halves, or in pairs. ``only`` has
    the numbers of the tensors that are meant, where several pass and not all of them are.
    """

    groups: int = 1
    parts: int = 2
    only: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dims(*self.only)
        if not 0 < self.groups < _MAX_NUMBER or not 0 < self.parts < _MAX_NUMBER:
            raise ValueError(f"groups and parts are positive numbers, not {self.groups} and {self.parts}")


class Interleave(_Order, frozen=True):
    """Outside, the parts of each group lie one after the other; inside, the first of each part, then the second..."""


class Deinterleave(_Order, frozen=True):
    """Inside, the parts of each group lie one after the other; outside, the first of each part, then the second..."""


Operation = Concat | Split | Stack | Unstack | Transpose | Interleave | Deinterleave
_PAIRS = (Concat, Split), (Stack, Unstack), (Interleave, Deinterleave)
_INVERSES: dict[type[Operation], type[Operation]] = {**dict(_PAIRS), **{other: one for one, other in _PAIRS}}


class _Rule(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="rule", tag=str.lower
):
    """What all rules have in common."""


class Move(_Rule, frozen=True):
    """Tensors that have other names, or are laid out in another way, outside and inside.

    ``operations`` lead from outside to inside, one after the other. In a pattern, ``{i}`` (one letter) stands for a
    number, ``{name}`` for what is between two dots, ``{name...}`` for one or more of these. A name stands for the same
    text in all patterns of the rule. Only the number of a list is missing on the side where the list is one tensor.
    """

    outside: str | tuple[str, ...]
    inside: str | tuple[str, ...]
    operations: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        for side in ("outside", "inside", "operations"):
            given = getattr(self, side)
            if not isinstance(given, str):
                given = given[0] if len(given) == 1 and side != "operations" else tuple(given)
                msgspec.structs.force_setattr(self, side, given)
        for patterns in (self.outsides, self.insides):
            if not 0 < len(patterns) <= _MAX_PATTERNS or len({*patterns}) < len(patterns):
                raise ValueError(f"a Move has one pattern or more on each side, and none twice: {str(self)[:200]}")
        if len(self.operations) > _MAX_OPERATIONS:
            raise ValueError(f"a Move has at most {_MAX_OPERATIONS} operations: {self.outside!r}")
        names = [{name for name, _ in places_of(pattern)} for pattern in (*self.outsides, *self.insides)]
        outside, inside = names[0], names[-1]
        if any(each != outside for each in names[: len(self.outsides)]) or inside != names[len(self.outsides)]:
            raise ValueError(
                f"all patterns of one side have the same names in braces: {self.outside!r}, {self.inside!r}"
            )
        if any(each != inside for each in names[len(self.outsides) :]) or len(outside ^ inside) > 1:
            raise ValueError(f"both sides have the same names in braces: {self.outside!r}, {self.inside!r}")
        if (self.number is None) == any(isinstance(each, (Stack, Unstack)) for each in self.operations):
            raise ValueError(f"a number for the list, and Stack or Unstack: both or none of them, in {self.outside!r}")
        _check_chain(self)

    @property
    def outsides(self) -> tuple[str, ...]:
        return (self.outside,) if isinstance(self.outside, str) else self.outside

    @property
    def insides(self) -> tuple[str, ...]:
        return (self.inside,) if isinstance(self.inside, str) else self.inside

    def inverse(self) -> Move:
        """The rule that leads back; ValueError where nothing says how long the parts are that something is cut into."""
        return Move(self.inside, self.outside, tuple(map(_inverse, reversed(self.operations))))

    @property
    def number(self) -> str | None:
        """The name of the number of the list that is one tensor on the other side."""
        one, other = ({name for name, _ in places_of(side[0])} for side in (self.outsides, self.insides))
        return next(iter(one ^ other), None)


def _inverse(operation: Operation) -> Operation:
    if isinstance(operation, Split) and not operation.parts:
        raise ValueError(
            f"{operation} has the lengths of its parts from a state, and here is none; give it parts, as (4, 1, 1)"
        )
    other = _INVERSES.get(type(operation), type(operation))
    return other(**msgspec.structs.asdict(operation))


def _check_chain(move: Move) -> None:
    """ValueError unless the operations make as many tensors, and lists of them, as the patterns name."""
    count = len(move.outsides)
    is_list = move.number is not None and any(name == move.number for name, _ in places_of(move.outsides[0]))
    for operation in move.operations:
        if isinstance(operation, Concat):
            _check_parts(operation.parts, count, move.outside)
            count = 1
        elif isinstance(operation, Split):
            if count != 1:
                raise ValueError(f"a Split is of one tensor, not of {count}: {move.outside!r}")
            count = len(move.insides)
            _check_parts(operation.parts, count, move.inside)
        elif isinstance(operation, (Stack, Unstack)):
            if is_list != isinstance(operation, Stack):
                raise ValueError(f"a Stack is of a list, an Unstack is of one tensor: {move.outside!r}")
            is_list = not is_list
    if count != len(move.insides) or is_list != any(name == move.number for name, _ in places_of(move.insides[0])):
        raise ValueError(f"the operations for {move.outside!r} do not make {move.inside!r}")


def _check_parts(parts: tuple[int, ...], count: int, patterns: str | tuple[str, ...]) -> None:
    if parts and len(parts) != count:
        raise ValueError(f"{len(parts)} parts for {count} tensors of {patterns!r}")


class Tie(_Rule, frozen=True):
    """``inside`` has the contents of ``same_as``, which is inside too, and no tensor of its own outside.

    When it is saved, both must be equal. When it is loaded, both are filled.
    """

    inside: str
    same_as: str

    def __post_init__(self) -> None:
        if {*places_of(self.inside)} != {*places_of(self.same_as)}:
            raise ValueError(f"both sides of a Tie have the same names in braces: {self.inside!r}, {self.same_as!r}")


class Drop(_Rule, frozen=True):
    """What is not loaded (``outside``), or neither saved nor loaded (``inside``)."""

    outside: str = ""
    inside: str = ""

    def __post_init__(self) -> None:
        if bool(self.outside) == bool(self.inside):
            raise ValueError("a Drop names what is outside, or what is inside: one of both")
        places_of(self.outside or self.inside)

    def inverse(self) -> Drop:
        """The rule for the other side."""
        return Drop(outside=self.inside, inside=self.outside)


class Cast(_Rule, frozen=True):
    """An export writes the floating tensors of these names in the type ``dtype``, as "bfloat16"."""

    outside: str
    dtype: str

    def __post_init__(self) -> None:
        places_of(self.outside)
        found = TORCH_DTYPES.get(self.dtype)
        if found is None or not found.is_floating_point:
            raise ValueError(f"a Cast is to a floating dtype such as 'bfloat16', not to {self.dtype!r}")


class Offset(_Rule, frozen=True):
    """Inside, the elements of these tensors are by ``number`` larger than outside."""

    outside: str
    number: float

    def __post_init__(self) -> None:
        places_of(self.outside)


Rule = Move | Tie | Drop | Cast | Offset


def _check_dims(*dims: int) -> None:
    if any(not -64 <= dim < 64 for dim in dims):
        raise ValueError(f"{dims} are no dimensions of a tensor")


def places_of(pattern: str) -> list[tuple[str, bool]]:
    """The names in the braces of ``pattern``, each with whether it stands for several steps; ValueError for others."""
    if not 0 < len(pattern) <= _MAX_PATTERN:
        raise ValueError(f"a pattern has 1 to {_MAX_PATTERN} characters, not {len(pattern)}")
    if re.search(r"[{}]", _PLACE.sub("", pattern)):
        raise ValueError(f"{pattern!r} has braces that are no name, as {{i}}, {{name}} or {{name...}}")
    found = [(match[1], bool(match[2])) for match in _PLACE.finditer(pattern)]
    if sum(several for _, several in found) > 1:
        raise ValueError(f"{pattern!r} has two names that stand for several steps; it may have one")
    return found


def expression_of(pattern: str, *, any_number: bool = False) -> re.Pattern[str]:
    """What the keys that ``pattern`` stands for match; with ``any_number``, its own numbers stand for any number."""
    parts: list[str] = []
    seen: set[str] = set()
    end = 0
    for match in _PLACE.finditer(pattern):
        parts.append(_literal(pattern[end : match.start()], any_number))
        name = match[1]
        meant = r".+" if match[2] else r"(?:0|[1-9][0-9]{0,8})" if len(name) == 1 else r"[^.]+"
        is_again = name in seen and not any_number
        parts.append(f"(?P={name})" if is_again else f"(?:{meant})" if any_number else f"(?P<{name}>{meant})")
        seen.add(name)
        end = match.end()
    parts.append(_literal(pattern[end:], any_number))
    return re.compile("".join(parts), re.DOTALL)


def _literal(text: str, any_number: bool) -> str:
    return re.sub(r"[0-9]+", "[0-9]+", re.escape(text)) if any_number else re.escape(text)


class Template:
    """Makes the key that ``pattern`` stands for from the texts of its names, given in the order of ``names``."""

    def __init__(self, pattern: str, names: Sequence[str]) -> None:
        self._format = _PLACE.sub("%s", pattern.replace("%", "%%"))
        self._order = [names.index(name) for name, _ in places_of(pattern)]

    def key(self, texts: Sequence[str]) -> str:
        return self._format % tuple([texts[place] for place in self._order])
