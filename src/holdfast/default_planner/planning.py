"""How the ranks of a save plan together: they say what differs, and nothing twice.

A rank of the default planner first sends the fingerprint of its layout and a digest of its rows; one of each layout is
asked to describe it, and the coordinator plans for all from the descriptions. What several ranks hold is then compared
by one digest for each set of holders, and looked at closely only where those differ. Every rank gets what it writes as
columns of its own rows. Both sides remember that: in the next save a rank whose layout is the same sends the name of
that planning and its digests, and nothing is planned again.

A planner of another class, a leaf that follows no rule, storage that changes plans, rows that are not what the layout
says: then all ranks send their plans whole, and the planner's create_global_plan decides. A round is one ``scatter``;
``Asked`` is answered in the next one, anything else ends it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Generator, MutableSequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast._coord.ranks import Ranks
from holdfast._native.report import ShortReport
from holdfast._plan.layout import box_words, rows_digest, scrambled
from holdfast._state.paths import path_mapping
from holdfast._values.digest import digest
from holdfast._values.lazy import LazyDict, LazyList
from holdfast.default_planner.save_planner import DefaultSavePlanner
from holdfast.errors import InternalError
from holdfast.global_plan import check_contents
from holdfast.layout_plan import LayoutPlan
from holdfast.layouts import Layout, layout_of
from holdfast.local_plan import LocalLeaves
from holdfast.metadata import STORAGE_TYPES, Metadata
from holdfast.planner import SavePlan, SavePlanner, TensorHead, WriteColumns, write_columns
from holdfast.storage import StorageWriter, WriteResult

_PHASE = "planning the save"
_KEPT = 4
"""So many plannings are remembered: enough for a few models that take turns."""

_TOKEN_BYTES = 8
_Round = Generator[list["Asked | None"], list[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank says of its layout, and its number in meshes; whether it will look at contents."""

    fingerprint: bytes
    rows: int
    name: int
    looks: bool

    def __reduce__(self) -> tuple[type[Offer], tuple[bytes, int, int, bool]]:
        return Offer, (self.fingerprint, self.rows, self.name, self.looks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What the coordinator wants to know: "offer", "layout", "contents" of ``groups``, "details", "plan", "nothing"."""

    what: str
    groups: Groups | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Local rows that a rank has in common with others; rows of the same ``group`` with the same others."""

    rows: np.ndarray
    group: np.ndarray
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What a rank writes of its rows: ``rows`` (all of them where that is None), as chunk ``hint`` of their tensors.

    The rows at ``cut`` are cut to the boxes ``lo``, ``length``. ``heads`` are the keys that all ranks together say
    something else of than this one. ``job`` is what the metadata is made of.
    """

    rows: np.ndarray | None
    hint: np.ndarray
    cut: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    heads: dict[str, TensorHead | None]
    groups: Groups
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """The layouts of a job, apart from the receiver's own, at number ``own``; and which rank has which."""

    others: list[Layout]
    own: int
    layout_of: np.ndarray
    names: np.ndarray
    to_lowest_rank: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Final:
    """The end of planning ``token``; without ``choice``, the rank writes what it wrote after it the last time."""

    token: bytes
    storage_data: Any
    choice: Choice | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sketch:
    """The metadata of planning ``token`` in so few words that every rank can make it of what it knows."""

    token: bytes
    rest: Metadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Remembered:
    """What a rank keeps of a planning: its offer, what it wrote, what it compared, and how to make the metadata."""

    offer: Offer
    token: bytes
    columns: WriteColumns
    groups: Groups
    words: np.ndarray
    layouts: list[Layout]
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    """What the coordinator keeps of a planning."""

    token: bytes
    offers: list[Offer]
    manner: object
    plan: LayoutPlan


class _Memory:
    """What one rank keeps of plannings, the newest last; on the coordinator, also what was planned for all."""

    def __init__(self) -> None:
        self.remembered: list[_Remembered] = []
        self.outcomes: list[_Outcome] = []


class SavePlanning:
    """One planning of a save, on one rank: ``run`` gives its plan, then ``metadata`` what they write together."""

    def __init__(self, planner: SavePlanner, writer: StorageWriter, ranks: Ranks, *, name: int) -> None:
        self._planner = planner
        self._writer = writer
        self._ranks = ranks
        self._name = name
        self._memory: _Memory = ranks.kept.setdefault(_Memory, _Memory())
        self._local: LocalLeaves | None = None
        self._whole: SavePlan | None = None
        self._layout: Layout | None = None
        self._offer: Offer | None = None
        self._known: _Remembered | None = None
        self._round: _Round | None = None
        self._metadata: Metadata | None = None
        self._token = b""

    def run(self, set_up: Callable[[], None]) -> SavePlan:
        """What this rank writes; ``set_up`` makes planner and storage ready, and may fail like all else here."""

        def first() -> Any:
            set_up()
            return self._said_first()

        answer = self._ranks.scatter(_PHASE, first, self._merge)
        while isinstance(answer, Asked):
            answer = self._ranks.scatter(_PHASE, partial(self._reply, answer), self._merge)
        return self._finished(answer) if isinstance(answer, Final) else answer

    # --- every rank --------------------------------------------------------------------------------------------------

    def _said_first(self) -> Any:
        """The plan; or, where a layout says as much, an offer of it; or the name of the planning that had the same."""
        surveyed = self._planner.survey() if isinstance(self._planner, DefaultSavePlanner) else None
        if surveyed is None or self._ranks.size == 1:
            return self._writer.prepare_local_plan(self._planner.create_local_plan())
        self._local, plan = surveyed
        columns = self._local.columns
        self._whole = self._writer.prepare_local_plan(plan)
        self._layout = layout_of(self._local, path_mapping(plan.planner_data))
        if self._layout is None or self._whole is not plan or write_columns(plan.items) is not columns:
            return self._whole_plan()
        rows = rows_digest(columns.key, columns.lo, columns.length)
        self._offer = Offer(self._layout.fingerprint, rows, self._name, self._looks)
        self._known = next((each for each in self._memory.remembered if each.offer == self._offer), None)
        if self._known is None:
            return self._offer
        return self._known.token + self._digests(self._known.groups, self._known.words).tobytes()

    @property
    def _looks(self) -> bool:
        return isinstance(self._planner, DefaultSavePlanner) and self._planner.replica_check != "off"

    def _reply(self, asked: Asked) -> Any:
        if asked.what == "offer":
            return self._offer
        if asked.what == "layout":
            return self._layout
        if asked.what == "plan":
            return self._whole_plan()
        if asked.what == "nothing":
            return None
        assert asked.groups is not None
        if asked.what == "contents":
            return self._digests(asked.groups, self._words(asked.groups)).tobytes()
        return self._fingerprints(asked.groups)

    def _whole_plan(self) -> SavePlan:
        """The plan with what tells its contents apart, as far as storage has left it as it was."""
        assert self._whole is not None
        assert self._local is not None
        columns = self._local.columns
        if not isinstance(self._whole.items, LazyList) or self._whole.items.columns is not columns:
            return self._whole
        everything = Groups(rows=np.arange(len(columns)), group=np.zeros(len(columns), np.int64), count=1)
        columns = dataclasses.replace(columns, fingerprint=self._fingerprints(everything))
        return dataclasses.replace(self._whole, items=LazyList(columns))

    def _fingerprints(self, groups: Groups) -> np.ndarray:
        assert self._local is not None
        assert isinstance(self._planner, DefaultSavePlanner)
        return self._local.fingerprints(groups.rows, self._planner.replica_check)

    def _words(self, groups: Groups) -> np.ndarray:
        """A word for the key and the box of each of these rows, the same on every rank."""
        assert self._local is not None
        columns = self._local.columns
        rows = groups.rows
        used = np.unique(columns.key[rows]).tolist()
        of_key = np.zeros(len(columns.keys), dtype=np.uint64)
        of_key[used] = [digest(columns.keys[which].encode("utf-8", "surrogatepass")) for which in used]
        words: np.ndarray = of_key[columns.key[rows]] ^ scrambled(box_words(columns.lo[rows], columns.length[rows]))
        return words

    def _digests(self, groups: Groups, words: np.ndarray) -> np.ndarray:
        """One digest for each group: of all its contents, whatever order they are in; 0 where nobody looked."""
        digests = np.zeros(groups.count, dtype="<u8")
        if self._looks:
            np.add.at(digests, groups.group, scrambled(words ^ self._fingerprints(groups)))
        return digests

    def _finished(self, final: Final) -> SavePlan:
        """The plan of this rank, remembered for the saves to come."""
        assert self._offer is not None
        assert self._whole is not None
        self._token, known = final.token, self._known
        if final.choice is not None:
            known = self._chosen(final.token, final.choice)
        if known is None or known.token != final.token:
            raise InternalError("the coordinator names a planning that this rank does not know; please report it")
        # The same offer once only, and the newest last.
        self._memory.remembered = [each for each in self._memory.remembered if each.offer != self._offer][-_KEPT + 1 :]
        self._memory.remembered.append(known)
        self._known = known
        return dataclasses.replace(self._whole, items=LazyList(known.columns), storage_data=final.storage_data)

    def _chosen(self, token: bytes, choice: Choice) -> _Remembered:
        assert self._local is not None
        assert self._layout is not None
        assert self._offer is not None
        others = iter(choice.job.others)
        count = len(choice.job.others) + 1
        return _Remembered(
            offer=self._offer,
            token=token,
            columns=_chosen_columns(self._local.columns, choice, token),
            groups=choice.groups,
            words=self._words(choice.groups),
            layouts=[self._layout if number == choice.job.own else next(others) for number in range(count)],
            job=dataclasses.replace(choice.job, others=[]),
        )

    # --- the metadata, which all ranks return ------------------------------------------------------------------------

    @property
    def planned(self) -> Metadata:
        """What was planned together; on the coordinator."""
        assert self._metadata is not None
        return self._metadata

    def bound(self, results: list[MutableSequence[WriteResult]]) -> list[MutableSequence[WriteResult]]:
        """``results``; reports that say only what the plan does not say are told of the plan."""
        outcome = next((each for each in self._memory.outcomes if each.token == self._token), None)
        for rank, result in enumerate(results):
            report = result.columns if isinstance(result, LazyList) else None
            if outcome is not None and isinstance(report, ShortReport) and report.planning == outcome.token:
                report.plan = partial(_columns_of, outcome, rank)
        return results

    def sketched(self) -> Metadata | Sketch:
        """What the coordinator tells the others of the metadata: few words where nobody has changed it."""
        metadata, entries = self.planned, self.planned.state_dict_metadata
        known = isinstance(entries, LazyDict) and isinstance(entries.source, LayoutPlan) and entries.is_untouched
        if not self._token or not known or metadata.storage_data is not None:
            return metadata
        return Sketch(
            token=self._token, rest=dataclasses.replace(metadata, state_dict_metadata={}, planner_data=None, paths={})
        )

    def metadata(self, told: Metadata | Sketch) -> Metadata:
        """The metadata that ``sketched`` stands for; chunks are computed when somebody looks at them."""
        if isinstance(told, Metadata):
            return told
        if self._metadata is not None:
            return self._metadata
        known = self._known
        if known is None or known.token != told.token:
            raise InternalError("the coordinator's metadata is of another planning; please report it")
        keys = dict.fromkeys(key for layout in known.layouts for key in layout.keys)
        metadata = dataclasses.replace(told.rest, state_dict_metadata=LazyDict(keys, _LaterPlan(known)))
        assert isinstance(self._planner, DefaultSavePlanner)
        return self._planner.with_paths(metadata, [layout.paths for layout in known.layouts])

    # --- the coordinator ---------------------------------------------------------------------------------------------

    def _merge(self, parts: list[Any]) -> list[Any]:
        """What each rank is told, or asked, after what all of them have said."""
        try:
            if self._round is None:
                self._round = self._coordinated(parts)
                asked = next(self._round)
            else:
                asked = self._round.send(parts)
        except StopIteration as end:
            answers: list[Any] = end.value
            return answers
        return [each or Asked(what="nothing") for each in asked]

    def _coordinated(self, parts: list[Any]) -> _Round:
        if any(isinstance(part, SavePlan) for part in parts) or self._offer is None:
            return (yield from self._planned_whole(parts))
        outcome = self._named_by_all(parts)
        if outcome is not None:
            said = [part[_TOKEN_BYTES:] for part in parts]
        else:
            offers = yield from self._offers(parts)
            plan = yield from self._laid_out(offers)
            if plan is None:
                return (yield from self._planned_whole([None] * len(parts)))
            outcome = _Outcome(token=secrets.token_bytes(_TOKEN_BYTES), offers=offers, manner=self._manner, plan=plan)
            said = []
            if any(offer.looks for offer in offers) and len(plan.compared.row):
                said = yield [Asked(what="contents", groups=_groups(plan, rank)) for rank in range(len(parts))]
        yield from self._compared(outcome.plan, said)
        return self._finals(outcome, parts)

    @property
    def _manner(self) -> object:
        assert isinstance(self._planner, DefaultSavePlanner)
        return self._planner.flatten_state_dict, self._planner.dedup_save_to_lowest_rank

    def _named_by_all(self, parts: list[Any]) -> _Outcome | None:
        """The planning that every rank names, unless its outcome would be another now."""
        first = parts[0]
        if not isinstance(first, bytes):
            return None
        token = first[:_TOKEN_BYTES]
        if not all(isinstance(part, bytes) and part.startswith(token) for part in parts):
            return None
        known = next((each for each in self._memory.outcomes if each.token == token), None)
        return known if known is not None and known.manner == self._manner else None

    def _offers(self, parts: list[Any]) -> Generator[list[Asked | None], list[Any], list[Offer]]:
        """The offers of all ranks: where a rank names a planning, the one that it made then."""
        before = {outcome.token: outcome.offers for outcome in self._memory.outcomes}
        offers = [
            part
            if isinstance(part, Offer)
            else before[part[:_TOKEN_BYTES]][rank]
            if part[:_TOKEN_BYTES] in before
            else None
            for rank, part in enumerate(parts)
        ]
        if None in offers:
            again = yield [Asked(what="offer") if offer is None else None for offer in offers]
            offers = [offer or again[rank] for rank, offer in enumerate(offers)]
        return [offer for offer in offers if offer is not None]

    def _laid_out(self, offers: list[Offer]) -> Generator[list[Asked | None], list[Any], LayoutPlan | None]:
        """The plan of all, from one description of each layout; None where the rows of a rank are others."""
        assert self._layout is not None
        numbers: dict[bytes, int] = {}
        layout_of_rank = np.array([numbers.setdefault(offer.fingerprint, len(numbers)) for offer in offers])
        known = {
            layout.fingerprint: layout
            for layout in (self._layout, *(each for outcome in self._memory.outcomes for each in outcome.plan.layouts))
        }
        asked: list[Asked | None] = [None] * len(offers)
        for rank, offer in enumerate(offers):
            if offer.fingerprint not in known and layout_of_rank[rank] not in layout_of_rank[:rank]:
                asked[rank] = Asked(what="layout")
        if any(asked):
            for layout in (yield asked):
                if layout is not None:
                    known[layout.fingerprint] = layout
        assert isinstance(self._planner, DefaultSavePlanner)
        plan = LayoutPlan(
            [known[fingerprint] for fingerprint in numbers],
            layout_of_rank,
            np.array([offer.name for offer in offers], dtype=np.int64),
            to_lowest_rank=self._planner.dedup_save_to_lowest_rank,
        )
        said = np.array([offer.rows for offer in offers], dtype=np.uint64)
        return plan if not plan.has_odd_ties and np.array_equal(plan.row_digests(), said) else None

    def _compared(self, plan: LayoutPlan, said: list[bytes]) -> Generator[list[Asked | None], list[Any], None]:
        """RankDisagreementError where ranks hold different contents; only then is asked which."""
        differing = _differing(plan, said)
        if not differing:
            return
        groups = [_groups(plan, rank) if rank in differing else None for rank in range(plan.ranks)]
        details = yield [None if each is None else Asked(what="details", groups=each) for each in groups]
        plans = []
        for rank, (each, found) in enumerate(zip(groups, details, strict=True)):
            if each is None:
                plans.append(SavePlan([]))
                continue
            columns = plan.rows_of(rank)
            fingerprint = np.zeros(len(columns), dtype=np.uint64)
            fingerprint[each.rows] = found
            plans.append(SavePlan(LazyList(dataclasses.replace(columns, fingerprint=fingerprint))))
        check_contents(plans)

    def _finals(self, outcome: _Outcome, parts: list[Any]) -> list[Any]:
        """What every rank is told; ``planner`` and storage are told of the whole."""
        plan, planner = outcome.plan, self._planner
        assert isinstance(planner, DefaultSavePlanner)
        self._memory.outcomes = [each for each in self._memory.outcomes if each.token != outcome.token][-_KEPT + 1 :]
        self._memory.outcomes.append(outcome)
        made: list[SavePlan] = [
            SavePlan(
                LazyList.later(partial(_columns_of, outcome, rank)),
                planner_data=plan.layouts[plan.layout_of[rank]].paths if planner.flatten_state_dict else None,
            )
            for rank in range(plan.ranks)
        ]
        metadata = planner.with_paths(plan.metadata(), [layout.paths for layout in plan.layouts])
        planner.global_plan, planner.metadata = made, metadata
        prepared = self._writer.prepare_global_plan(made)
        self._metadata, self._token = metadata, outcome.token
        answers: list[Any] = []
        for rank, final in enumerate(prepared):
            if (
                final.items is not made[rank].items
                or not isinstance(final.items, LazyList)
                or not final.items.is_unmade
            ):
                answers.append(final)  # storage has looked at it, and may have changed it
                continue
            part = parts[rank]
            knows = isinstance(part, bytes) and part.startswith(outcome.token)
            choice = None if knows else _choice(plan, rank, to_lowest_rank=planner.dedup_save_to_lowest_rank)
            answers.append(Final(token=outcome.token, storage_data=final.storage_data, choice=choice))
        return answers

    def _planned_whole(self, parts: list[Any]) -> _Round:
        """What the planner decides when it sees the plans of all ranks."""
        if not all(isinstance(part, SavePlan) for part in parts):
            again = yield [None if isinstance(part, SavePlan) else Asked(what="plan") for part in parts]
            parts = [part if isinstance(part, SavePlan) else again[rank] for rank, part in enumerate(parts)]
        plans, self._metadata = self._planner.create_global_plan(parts)
        return list(self._writer.prepare_global_plan(plans))


class _LaterPlan:
    """The metadata's entries on a rank that planned nothing: planned again, from the layouts, if somebody looks."""

    def __init__(self, known: _Remembered) -> None:
        self._known = known
        self._plan: LayoutPlan | None = None

    def __len__(self) -> int:
        return len(self._made)

    def item(self, row: int) -> STORAGE_TYPES:
        """What the metadata says of key number ``row``."""
        return self._made.item(row)

    @property
    def _made(self) -> LayoutPlan:
        if self._plan is None:
            job = self._known.job
            self._plan = LayoutPlan(
                self._known.layouts, job.layout_of.astype(np.int64), job.names, to_lowest_rank=job.to_lowest_rank
            )
        return self._plan


def _groups(plan: LayoutPlan, rank: int) -> Groups:
    """What ``rank`` has in common with others."""
    rows, _, sets = plan.compared.of(rank)
    distinct, group = np.unique(sets, return_inverse=True)
    return Groups(
        rows=rows, group=group.astype(np.uint16 if len(distinct) <= 1 << 16 else np.uint32), count=len(distinct)
    )


def _differing(plan: LayoutPlan, said: list[bytes]) -> set[int]:
    """The ranks of the sets of holders in which not all digests are the same; those that did not look do not count."""
    if not any(said):
        return set()
    owners, sets = plan.group_sets
    digests = np.concatenate([np.frombuffer(each, dtype="<u8") for each in said])
    if len(digests) != len(sets):
        raise InternalError("a rank sent digests of other contents than it holds; please report it")
    looked = digests != 0
    largest, smallest = (np.full(len(plan.sets), start, dtype=np.uint64) for start in (0, 2**64 - 1))
    np.maximum.at(largest, sets[looked], digests[looked])
    np.minimum.at(smallest, sets[looked], digests[looked])
    wrong = (largest > smallest)[sets] & looked
    return set(owners[wrong].tolist())


def _choice(plan: LayoutPlan, rank: int, *, to_lowest_rank: bool) -> Choice:
    """What ``rank`` writes, and what it needs to know to remember it."""
    rows, keys, numbers = plan.written.of(rank)
    number = int(plan.layout_of[rank])
    layout = plan.layouts[number]
    cut = np.flatnonzero(plan.is_cut[keys])
    boxes = [
        (plan.chunks[key].lo[chunk].tolist(), plan.chunks[key].length[chunk].tolist())
        for key, chunk in zip(keys[cut].tolist(), numbers[cut].tolist(), strict=True)
    ]
    is_everything = np.array_equal(rows, np.arange(plan.held_rows[rank]))
    width = max((len(low) for low, _ in boxes), default=0)
    return Choice(
        rows=None if is_everything else rows,
        hint=_narrow(numbers),
        cut=cut.astype(np.uint32),
        lo=np.array([low + [0] * (width - len(low)) for low, _ in boxes], dtype=np.int64).reshape(len(cut), width),
        length=np.array([size + [1] * (width - len(size)) for _, size in boxes], np.int64).reshape(len(cut), width),
        heads=plan.changed_heads(number),
        groups=_groups(plan, rank),
        job=Job(
            others=[each for each in plan.layouts if each is not layout],
            own=number,
            layout_of=_narrow(plan.layout_of),
            names=plan.names,
            to_lowest_rank=to_lowest_rank,
        ),
    )


def _chosen_columns(local: WriteColumns, choice: Choice, token: bytes) -> WriteColumns:
    """The rows that are written, of all that a rank holds."""
    rows = np.arange(len(local)) if choice.rows is None else choice.rows
    lo, length = local.lo[rows], local.length[rows]
    width = choice.lo.shape[1]
    lo[choice.cut, :width], length[choice.cut, :width] = choice.lo, choice.length
    used, key = np.unique(local.key[rows], return_inverse=True)
    names = [local.keys[number] for number in used.tolist()]
    return WriteColumns(
        keys=names,
        heads=[choice.heads.get(name, local.heads[number]) for name, number in zip(names, used.tolist(), strict=True)],
        key=key.astype(np.int64),
        lo=lo,
        length=length,
        hint=choice.hint.astype(np.int64),
        is_shard=local.is_shard[rows],
        planning=token,
    )


def _columns_of(outcome: _Outcome, rank: int) -> WriteColumns:
    """What ``rank`` makes of what it is told; for planners and storage that look at the plans of all."""
    plan = outcome.plan
    return _chosen_columns(plan.rows_of(rank), _choice(plan, rank, to_lowest_rank=False), outcome.token)


def _narrow(numbers: np.ndarray) -> np.ndarray:
    largest = int(numbers.max(initial=0))
    return numbers.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32)
