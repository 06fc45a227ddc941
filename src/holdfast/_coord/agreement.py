"""Whether all ranks said the same, and who did not. Pure; values are compared as they print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from holdfast.errors import RankDisagreementError

_LONGEST = 200  # characters of what one camp said
_MOST_CAMPS = 4


def agreed(name: str, said: Mapping[int, str]) -> None:
    """Nothing when all ranks said the same of ``name``; else RankDisagreementError, whose failures are the minority."""
    camps = Counter(said.values()).most_common()
    if len(camps) <= 1:
        return
    by_camp = {what: [rank for rank in sorted(said) if said[rank] == what] for what, _ in camps}
    shown = [f"{_ranks(ranks)} {_shortened(what)}" for what, ranks in list(by_camp.items())[:_MOST_CAMPS]]
    more = f" and {len(camps) - _MOST_CAMPS} other answers" if len(camps) > _MOST_CAMPS else ""
    majority = camps[0][0]
    error = RankDisagreementError(
        f"the ranks disagree on the {name}: {', '.join(shown)}{more}; call with the same on every rank", said=said
    )
    error.failures = {
        rank: RankDisagreementError(f"rank {rank} said {_shortened(what)}")
        for rank, what in sorted(said.items())
        if what != majority
    }
    raise error


def different_calls(keys: Mapping[int, str]) -> RankDisagreementError:
    """The error of ranks that are at different calls; a key is a function and a path."""
    is_path = len({key.partition(" ")[0] for key in keys.values()}) == 1
    said = {rank: keys[rank].partition(" ")[2] if is_path else keys[rank] for rank in sorted(keys)}
    try:
        agreed("checkpoint path" if is_path else "call", said)
    except RankDisagreementError as error:
        return error
    raise ValueError(f"the same call: {keys}")


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3 says``, ``ranks 0-2 and 5 say``: runs are shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs]
    listed = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank {listed} says" if len(ranks) == 1 else f"ranks {listed} say"


def _shortened(what: str) -> str:
    return what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."
