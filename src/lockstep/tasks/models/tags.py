"""Tags of words -> entities, in every scheme of tags there is: IOB1, IOB2, IOE1, IOE2, IOBES, BILOU, BMES, BMEWO.

In: the tags of a data set. Out: what each says of its word, and the entities that a row of them marks. The letters of
the schemes do not contradict each other: a word is the first (B), inside (I, M), the last (E, L), or all (S, U, W) of
an entity, and so one reading does for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from lockstep.config.run import RunError

_READ = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"}  # in words of IOBES
_PREFIX = r"(?P<letter>[^\W\d_])[-_](?P<kind>.+)"  # B-PER, B_PER
_OTHERS = (r"(?P<kind>.+)[-_](?P<letter>[^\W\d_])", r"(?P<letter>[A-Z])(?P<kind>)")  # PER-B, B
_OUTSIDE = ("", "")


def parts(tags: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Tag -> its letter in IOBES and its kind of entity (_, where it has a letter only); both empty outside of any. A
    tag without a letter is the kind of an entity of one word. Letters are read where some tag of that form has B or I,
    so that names that look like it (the parts of speech NN-TL, V_S) are names. Errors: `RunError` for a letter of no
    scheme beside those of one."""
    names = sorted(set(tags))
    marks = {tag for tag in names if tag not in ("O", "o")}
    for form in (_PREFIX, *_OTHERS):
        found = {tag: match for tag in marks if (match := re.fullmatch(form, tag))}
        letters = {tag: match["letter"].upper() for tag, match in found.items()}
        known = {tag: letter for tag, letter in letters.items() if letter in _READ}
        if not {"B", "I"} & set(known.values()) or (form != _PREFIX and known.keys() != marks):
            continue
        _refuse_others(letters, {tag: match["kind"] for tag, match in found.items()})
        read = {tag: (_READ[letter], found[tag]["kind"] or "_") for tag, letter in known.items()}
        outside = {tag: _OUTSIDE for tag, letter in letters.items() if letter == "O"}
        return {tag: (read | outside).get(tag, _alone(tag)) for tag in names}
    return {tag: _alone(tag) for tag in names}


def _refuse_others(letters: Mapping[str, str], kinds: Mapping[str, str]) -> None:
    """Errors: `RunError`."""
    read = {kinds[tag] for tag, letter in letters.items() if letter in _READ}
    others = [tag for tag, letter in letters.items() if letter not in _READ and letter != "O" and kinds[tag] in read]
    if others:
        raise RunError(
            f"task.tags: {min(others)!r} begins with a letter of no scheme of tags, and others with letters of one: "
            "read are B I O E S, B I L O U, B M E S O and B M E W O. Rename such tags"
        )


def _alone(tag: str) -> tuple[str, str]:
    """Of a tag that is read as it stands."""
    return _OUTSIDE if tag in ("O", "o") else ("S", tag)


def entities(row: Sequence[tuple[str, str]]) -> set[tuple[int, int, str]]:
    """(first word, word after the last, kind) of the entities that a row of `parts` marks. What is inside and follows
    nothing of its kind begins an entity (conlleval's rule)."""
    found = set()
    start, kind = 0, ""
    for place, (letter, name) in enumerate([*row, _OUTSIDE]):
        if kind and (letter in ("", "B", "S") or name != kind):
            found.add((start, place, kind))
            kind = ""
        if letter and not kind:
            start, kind = place, name
        if kind and letter in ("S", "E"):
            found.add((start, place + 1, kind))
            kind = ""
    return found
