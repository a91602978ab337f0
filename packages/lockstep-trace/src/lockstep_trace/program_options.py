"""Finds the passwords in a command that stand behind options of one program: `mysql -pVALUE`, `sshpass -p VALUE`.
Options that name a secret themselves (`--token`) are for redaction.py.

In: the words of a command, or a text with commands. Out: where in each word, or in the text, a password stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Rule:
    programs: str  # regular expression of the program's name
    joined: str = ""  # options whose password stands in the same word
    next_word: str = ""  # options whose password is the next word
    before: str = ""  # what stands in the value before the password
    command: str = ""  # a word of the program after which the rule holds
    bare: bool = False  # the first word without a dash is the password


_RULES = (
    _Rule(r"(?:mysql|mariadb)[\w-]*", joined="-p"),
    _Rule(r"sshpass|mongo\w*|az", joined="-p", next_word="-p"),
    _Rule(r"docker|podman|nerdctl|skopeo|buildah|helm|oras|crane", joined="-p", next_word="-p", command="login"),
    _Rule(r"(?:redis|keydb|valkey)-\w+", next_word="-a"),
    _Rule(r"zip|unzip|sqlcmd|bcp|tsql|ipmitool|mosquitto_\w+", joined="-P", next_word="-P"),
    _Rule(r"7z\w*|rar|unrar", joined="-p"),
    _Rule(r"ldap\w+", joined="-w", next_word="-w"),
    _Rule(r"openssl", next_word="-k"),
    _Rule(r"openssl", next_word="-pass|-passin|-passout", before="pass:"),
    _Rule(r"smbclient|rpcclient|net", joined="-U", next_word="-U|--user", before="[^%]*%"),
    _Rule(r"lftp", joined="-u", next_word="-u|--user", before="[^,]*,"),
    _Rule(r"https?|xh", joined="-a", next_word="-a|--auth", before="[^:]+:"),
    _Rule(r"mount\S*", joined="-o", next_word="-o", before=r"(?:.*,)?(?:pass|password)="),
    _Rule(r"curl", joined="-b", next_word="-b", before="[^=]+="),
    _Rule(r"influx", joined="-t", next_word="-t"),
    _Rule(r"wandb|vault", command="login", bare=True),
    _Rule(r"aws", command=r"\w+_(?:secret_access_key|access_key_id|session_token)", bare=True),
)
_KNOWN = re.compile("|".join(f"(?:{rule.programs})" for rule in _RULES))
# A word of a shell, or an end of a command
_WORD = re.compile(r"(?P<end>[;&|\n()`]+)|(?:\\.|[^\s\"';&|()`]|\"[^\"]*\"|'[^']*')+")


def passwords_in_words(words: Sequence[str]) -> dict[int, int]:
    """Return for each word that holds a password the position in it at which the password begins."""
    starts_at: dict[int, int] = {}
    since: int | None = None  # where the command of a known program begins
    for i, word in enumerate(words):
        if word in (";", "&", "&&", "|", "||"):
            since = None
        elif i not in starts_at and _KNOWN.fullmatch(word.rsplit("/", 1)[-1]):
            since = i
        elif since is not None:
            program = words[since].rsplit("/", 1)[-1]
            rules = (rule for rule in _RULES if re.fullmatch(rule.programs, program))
            starts = [start for rule in rules if (start := _start(rule, words[since:i], word)) is not None]
            if starts:
                starts_at[i] = max(starts)
    return starts_at


def _start(rule: _Rule, earlier: Sequence[str], word: str) -> int | None:
    if rule.command and not any(re.fullmatch(rule.command, other) for other in earlier[1:]):
        return None
    if rule.bare:
        after = next(k for k, other in enumerate(earlier) if k and re.fullmatch(rule.command, other))
        taken = any(not other.startswith("-") for other in earlier[after + 1 :])
        return None if taken or word.startswith("-") else 0
    if rule.next_word and re.fullmatch(rule.next_word, earlier[-1]) and len(earlier) > 1:
        match = re.match(rule.before, word.strip("\"'"))
        quote = len(word) - len(word.lstrip("\"'"))
        return None if match is None else quote + match.end()
    joined = re.match(rf"(?:{rule.joined}){rule.before}(?=.)", word) if rule.joined else None
    return None if joined is None else joined.end()


def passwords_in_text(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each password in a text with commands, such as that of `sh -c`."""
    if not _KNOWN.search(text):
        return
    matches = list(_WORD.finditer(text))
    words = [";" if match.group("end") else match.group() for match in matches]
    for i, start in passwords_in_words(words).items():
        yield matches[i].start() + start, matches[i].end()
