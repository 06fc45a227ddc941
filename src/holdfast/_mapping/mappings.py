"""``Mapping``: a list of rules, and what to ask of it.

One list serves both directions. It is JSON as well as Python; JSON is checked and bounded as it is read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import msgspec
import torch

from holdfast._mapping.matching import Fault, Matched, Matcher, Shapes, match, outside_faults
from holdfast._mapping.rules import Cast, Drop, Move, Offset, Rule, Template, Tie, places_of
from holdfast._mapping.transformers import rules_of
from holdfast._state.tensors import TORCH_DTYPES

MAX_RULES = 100_000
MAX_JSON_BYTES = 64 << 20
VERSION = 1


class Mapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """How the tensors of files (outside) and those of a state (inside) belong together, in both directions.

    What no rule names has the same name on both sides; with ``strict``, that is a fault.
    """

    rules: tuple[Rule, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "rules", tuple(self.rules))
        if len(self.rules) > MAX_RULES:
            raise ValueError(f"a mapping has at most {MAX_RULES} rules, not {len(self.rules)}")
        for rule in self.rules:
            if not isinstance(rule, (Move, Tie, Drop, Cast, Offset)):
                raise ValueError(f"{rule!r} is no rule; rules are Move, Tie, Drop, Cast and Offset")

    def to_json(self) -> str:
        """The mapping as text, which ``from_json`` takes."""
        return _encode(_MappingText(rules=self.rules, strict=self.strict)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Mapping:
        """The mapping that ``text`` has; ValueError, naming it, for a rule or operation that is not known."""
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"a mapping is at most {MAX_JSON_BYTES} bytes of JSON, not {len(text)}")
        try:
            read = _decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"this is no mapping that this version of holdfast knows: {error}") from None
        return cls(read.rules, read.strict)

    @classmethod
    def from_transformers(cls, model: object) -> Mapping:
        """The mapping between a model of transformers, or a configuration, and what ``save_pretrained`` writes of it.

        ImportError where transformers is not installed; ValueError, naming it, for a conversion that has no rule.
        """
        return cls(tuple(rules_of(model)))

    def check(self, outside: Shapes | None, inside: Shapes) -> tuple[Fault, ...]:
        """Every fault of the mapping for these keys, with their shapes, or None for what is no tensor.

        ``outside`` is None where it follows from the inside, as for an export.
        """
        matched = self.matched(inside)
        differences = [] if outside is None else self.differences(matched, outside, inside)
        return (*matched.faults, *self.rules_twice(matched), *differences)

    def matched(self, inside: Shapes) -> Matched:
        """What the rules mean for these keys."""
        return match(self.rules, inside, strict=self.strict)

    def from_outside(self, outside: Shapes) -> Matched:
        """What is inside, where nothing is known but ``outside``: the two sides of a match have changed places in it.

        Its ties lead from one key inside to another. It has all faults. ValueError for a rule that leads one way only.
        """
        back = match([rule.inverse() for rule in self.rules if isinstance(rule, (Move, Drop))], outside)
        faults = [replace(fault, side="outside" if fault.side == "inside" else "inside") for fault in back.faults]
        inside = {key: outside[name] for key, name in back.same.items()}
        inside |= {key: size for key, size in back.outside().items() if size is not None}
        ties = [rule for rule in self.rules if isinstance(rule, Tie)]
        matcher = Matcher([tie.same_as for tie in ties])
        for key in [*inside] if ties else ():
            for number, texts in matcher.find(key):
                names = tuple(dict.fromkeys(name for name, _ in places_of(ties[number].same_as)))
                tied = Template(ties[number].inside, names).key(texts)
                if tied in inside:
                    problem = f"is not in the files of a model where it is tied to {key!r}; drop it by a rule"
                    faults.append(Fault(key=tied, side="outside", kind="unclaimed", problem=problem))
                back.ties[tied], inside[tied] = key, inside[key]
        return replace(back, faults=faults or [*self.check(outside, inside)])

    def rules_twice(self, matched: Matched) -> list[Fault]:
        """The outside keys to which two rules give a dtype, or two an offset."""
        matchers = [matcher for matcher in (self._cast_names, self._offset_names) if matcher]
        keys = matched.outside() if matchers else ()
        problem = "has two dtypes or two offsets by the rules; give it one"
        return [
            Fault(key=key, side="outside", kind="twice", problem=problem)
            for key in keys
            if any(len(matcher.find(key)) > 1 for matcher in matchers)
        ]

    def differences(self, matched: Matched, outside: Shapes, inside: Shapes) -> list[Fault]:
        """How the keys ``outside`` differ from those that the rules make of those inside."""
        return outside_faults(matched, outside, inside, dropped=self._drop_names)

    def dtype_of(self, key: str) -> torch.dtype | None:
        """The type in which an export writes the outside tensor ``key``; None for the type that it has inside."""
        found = self._cast_names.find(key)
        return TORCH_DTYPES[self._casts[found[0][0]].dtype] if found else None

    def offset_of(self, key: str) -> float:
        """What is added to the outside tensor ``key`` to have what is inside; 0.0 for most."""
        found = self._offset_names.find(key)
        return self._offsets[found[0][0]].number if found else 0.0

    @property
    def has_offsets(self) -> bool:
        """Whether any rule is an Offset."""
        return bool(self._offsets)

    def moves(self, key: str) -> bool:
        """Whether a rule leads from the outside key ``key`` to another place, or to none."""
        return bool(self._outside_names.find(key)) or self.drops(key)

    def drops(self, key: str) -> bool:
        """Whether a rule says that the outside key ``key`` is not loaded."""
        return bool(self._drop_names.find(key))

    @cached_property
    def _casts(self) -> list[Cast]:
        return [rule for rule in self.rules if isinstance(rule, Cast)]

    @cached_property
    def _offsets(self) -> list[Offset]:
        return [rule for rule in self.rules if isinstance(rule, Offset)]

    @cached_property
    def _cast_names(self) -> Matcher:
        return Matcher([rule.outside for rule in self._casts])

    @cached_property
    def _offset_names(self) -> Matcher:
        return Matcher([rule.outside for rule in self._offsets])

    @cached_property
    def _drop_names(self) -> Matcher:
        return Matcher([rule.outside for rule in self.rules if isinstance(rule, Drop) and rule.outside])

    @cached_property
    def _outside_names(self) -> Matcher:
        return Matcher([name for rule in self.rules if isinstance(rule, Move) for name in rule.outsides])


class _MappingText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="holdfast-mapping"):
    """The JSON of a mapping."""

    version: int = VERSION
    strict: bool = False
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"it has version {self.version}, this holdfast reads version {VERSION}; upgrade holdfast")


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_MappingText).decode
