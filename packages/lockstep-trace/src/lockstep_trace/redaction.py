"""Redacts secrets and escapes terminal control characters in all text that leaves this process.

In: any text, such as user data, a library's error, a path; or the words of a command. Out: the text without anything
that looks like a token, key or password, or is one in this process's environment. Every sink calls this.
No pattern detects a password that looks like a word.

In commands, passwords that follow an option of one program are redacted, too (`mysql -pVALUE`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

STRUCK = "***"
_SHORTEST = 8  # min. length of an environment secret to redact; shorter ones are words
# Patterns of tokens and keys, by issuer.
_TOKENS = [
    r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}",  # Hugging Face
    r"sk-[A-Za-z0-9_-]{20,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",  # OpenAI, Anthropic; Stripe
    r"(?:AKIA|ASIA)[A-Z0-9]{12,}",  # AWS
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}",
    r"gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt|oas)-[A-Za-z0-9_.-]{20,}",  # GitLab
    r"xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}|hooks\.slack\.com/services/[A-Za-z0-9/]{20,}",
    r"AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}",  # Google
    r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*",  # JWTs
    r"npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{40,}|dckr_pat_[A-Za-z0-9_-]{20,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{20,}|dapi[a-f0-9]{32}|r8_[A-Za-z0-9]{30,}",
    r"wandb_v1_[A-Za-z0-9_-]{20,}|local-[a-f0-9]{40}",  # Weights & Biases
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----END)[\s\S])*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
]
TOKEN = re.compile("(?<![A-Za-z0-9])(?:" + "|".join(_TOKENS) + ")|-----BEGIN [A-Z ]*PRIVATE KEY")
# scheme://user:password@host, also with @ in the password; scheme://token@host
_ADDRESS = re.compile(r"(?P<keep>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^\s/@:\"']*:[^\s/\"']+|[^\s/@:\"']{20,})(?=@)")
_ADDRESSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:\"']*:([^\s/\"']+)@")  # captures the password
_QUERY = re.compile(
    r"(?P<keep>[?&;](?:access_|auth_|api_?|x-amz-)?(?:token|key|secret|password|passwd|sig|signature|credential"
    r"|security-token)=)(?!\*\*\*)[^\s&#\"'<>]+",
    re.IGNORECASE,
)
_WORDS = (
    "API[_-]?KEY|SECRET|SECRET[_-]?KEY|PASSWORD|PASSWD|PASSPHRASE|ACCESS[_-]?KEY|ACCESS[_-]?KEY[_-]?ID|PRIVATE[_-]?KEY"
    "|ACCOUNT[_-]?KEY|STORAGE[_-]?KEY|CONNECTION[_-]?STRING"  # Azure's
    "|(?:WANDB|COMET|NEPTUNE|HF|OPENAI|ANTHROPIC|AWS|GITHUB|SIGNING|ENCRYPTION)[_-]?KEY"
)
# Prefixes of secret tokens; others, such as pad_token, belong to a tokenizer.
_WHOSE = "hf|hub|huggingface|auth|access|api|bearer|refresh|session|bot|github|gitlab|wandb|slack"
_SPECIAL_TOKENS = "pad|eos|bos|unk|sep|cls|mask|start|end|additional_special"  # a tokenizer's
# NAME=value (variable or argument), 'name': 'value' (mapping)
_ASSIGNED = re.compile(
    rf"(?P<keep>\b(?:(?-i:(?:[A-Z][A-Z0-9_]*_)?(?:TOKEN|CREDENTIALS?|{_WORDS}))|(?:\w+_)?(?:{_WORDS}|(?:{_WHOSE})_token))"
    r"(?:\s?=\s?|[\"']\s?:\s?(?=[\"'])))(?!\*\*\*|[\"']\*\*\*|\.\.\.)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)",
    re.IGNORECASE,
)
# name: value in YAML or a table, for lower-case names of more than one word
_LISTED = re.compile(
    rf"(?P<keep>(?<![\w.-])(?:[a-z0-9]+[_-])*(?:[a-z0-9]+[_-](?:{_WORDS.lower()})|(?:{_WHOSE})[_-]token|api_?key):\s+)"
    r"(?!\*\*\*|\.\.\.|(?:null|none|true|false)\b)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;)]+)"
)
# Authorization: Bearer value; X-Api-Key: value (HTTP headers)
_HEADER = re.compile(
    r"(?P<keep>\b(?:Authorization:\s*(?:Bearer|Basic|token)\s+|(?:X(?:-[a-z]+)*-(?:key|token|secret)|Private-Token):\s*))"
    r"(?!\*\*\*)[^\s\"']+",
    re.IGNORECASE,
)
# --password value, --token=value (command line), '--password', 'value' (its words as a list)
_OPTION = re.compile(
    rf"(?P<keep>(?<![\w-])--(?!(?:{_SPECIAL_TOKENS})[_-]token)(?:[a-z0-9]+[_.-])*(?:{_WORDS}|token)"
    r"(?:\s+|=|[\"'],\s*(?=[\"'][^-\"'])))"
    r"(?!\*\*\*|(?-i:[A-Z_]+\b)|-)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)",
    re.IGNORECASE,
)
PATTERNS = (_ADDRESS, _QUERY, _ASSIGNED, _LISTED, _HEADER, _OPTION)
# "token": "value" in JSON among the words of a command; in other texts a token may be a piece of text
_SIGN_IN = "(?:proxy-)?authorization|(?:set-)?cookies?|bearer|pwd|pw|pass|passcode"  # in commands alone
_FIELD = re.compile(
    rf"(?P<keep>[\"'](?!(?:{_SPECIAL_TOKENS})[_-]token)(?:[a-z0-9]+[_.-])*(?:token|credentials?|{_SIGN_IN}|{_WORDS})\\?[\"']\s?:\s?)"
    r"(?!\\?[\"']\*\*\*)(?:\\?\"[^\"\n]*\"|\\?'[^'\n]*')",
    re.IGNORECASE,
)
_USER = r"-[uU]|--(?:[a-z]+[_-])*(?:user|username|userpwd|login|auth)"  # options whose value may be NAME:PASSWORD
_PASSWORD = r"(?!\*\*\*|//|\d+(?:\s|$))[^\s\"']+"  # after NAME:, which may also be one of two numbers
# --key VALUE, --auth VALUE: may also be a column or a method, so words, numbers and paths stay
_MAYBE = r"key|auth|creds?|sig|signature"
_MAYBE_NAME = re.compile(rf"(^|[_.-])({_MAYBE})$", re.IGNORECASE)
# name, NAME, inputIDs; not aGxLkP
_LETTERS = r"(?:[A-Z]{1,20}|[A-Z]{0,4}[a-z]{1,20}(?:[A-Z][a-z]{2,20}|[A-Z]{2,4}s?){0,4}[A-Z]?)"
_PLAIN = rf"{_LETTERS}(?:[ _.-](?:{_LETTERS}|[0-9]{{1,2}}))*[0-9]{{0,2}}|[\d.,:-]+|[~.\w-]*/\S*|<\S+>|\W{{0,3}}"
# In the words of a command, and in the texts of `sh -c`
_IN_COMMANDS = (
    _FIELD,
    re.compile(  # api-key: value (a header), token: value (YAML)
        rf"(?P<keep>(?<![\w.-])(?!(?:{_SPECIAL_TOKENS})[_-]token)(?:[a-z0-9]+[_-])*(?:token|subscription-key|{_WORDS}):\s*)"
        r"(?!\*\*\*|(?:null|none|true|false)\b)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;)}]+)",
        re.IGNORECASE,
    ),
    re.compile(  # "accessToken": value, accessToken=value
        r"(?P<keep>(?<![\w-])(?:--)?(?!(?:pad|eos|bos|unk|sep|cls|mask|start|end)Token)[a-z][A-Za-z0-9]*"
        r"(?:Token|Secret|Password|ApiKey|AccessKey|PrivateKey|SecretKey|Credentials?)(?:\\?[\"'])?(?:\s?[:=]\s?))"
        r"(?!\*\*\*|-)(?:\\?\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;)}]+)"
    ),
    re.compile(r"(?P<keep>\b(?:\w+_)?login\(\s*)(?!\*\*\*|\s*\))[^()]+"),  # login("name", key="value") of python -c
    re.compile(  # token="value" in Python; special tokens such as "[PAD]" and "<s>" stay
        r"(?P<keep>(?<![\w-])(?:token|password|passwd|secret)\s?=\s?[\"'])(?!\*\*\*|[\[<])[^\"'\n]+(?=[\"'])"
    ),
    re.compile(  # --key value, --auth=value, in a text
        rf"(?P<keep>(?<![\w-])--(?:[a-z0-9]+[_.-])*(?:{_MAYBE})(?:\s+|=)[\"']?)"
        rf"(?!\*\*\*|-|(?:{_PLAIN})(?:[\s\"';|&)]|$))[^\s\"';|&)]+",
        re.IGNORECASE,
    ),
    re.compile(rf"(?P<keep>(?<![\w-])(?:{_USER})(?:\s+|=)?[\"']?[\w.@+-]+:){_PASSWORD}"),  # -u name:password
    re.compile(r"(?P<keep>\bAuthorization:\s*(?:Digest|AWS4-HMAC-SHA256)\s+)(?!\*\*\*)[^\n]+", re.IGNORECASE),
    re.compile(r"(?P<keep>\b(?:Set-)?Cookie:\s*)(?!\*\*\*)[^\s\"'][^\n\"']*", re.IGNORECASE),
    re.compile(  # Authorization:value, of any scheme
        r"(?P<keep>(?:\b|(?<=-H))Authorization\s*[:=]\s*(?:[A-Za-z][\w-]*\s+)?)(?!\*\*\*|[A-Za-z][\w-]*\s+\*\*\*)[^\s\"']+",
        re.IGNORECASE,
    ),
    re.compile(  # --cookie value, --db-pass value, in a text
        rf"(?P<keep>(?<![\w-])--(?:[a-z0-9]+[_.-])*(?:{_SIGN_IN})(?:\s+|=))(?!\*\*\*|-|\d+\b)"
        r"(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)",
        re.IGNORECASE,
    ),
    re.compile(  # name:password@host without a scheme; an image has a hash there
        r"(?P<keep>(?<![\w/.:@-])[\w.+-]+:)(?!\*\*\*|//)[^\s/@:\"']+(?=@(?!sha\d+:)[\w-])"
    ),
)
_NAME = re.compile(rf"(^|[_.-])(token|credentials?|PGPASSWORD|SSHPASS|MYSQL_PWD|{_WORDS})$", re.IGNORECASE)
_SIGNED_IN = re.compile(rf"(^|[_.-])({_SIGN_IN})$", re.IGNORECASE)
_SPECIAL = re.compile(rf"(^|[_.-])({_SPECIAL_TOKENS})[_-]token$", re.IGNORECASE)
# C0 except tab and newline, DEL, C1; bidirectional controls; line ends that only some programs recognize; lone
# surrogates, which no file can contain
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def redact(text: str, of_environment: tuple[str, ...] | None = None) -> str:
    """Replace secrets in a text by ***. `of_environment`: the result of `secrets_in_environment`, to reuse for many
    texts."""
    if len(text) >= _SHORTEST:
        for value in secrets_in_environment() if of_environment is None else of_environment:
            text = text.replace(value, STRUCK)
    text = TOKEN.sub(STRUCK, text)
    for pattern in PATTERNS:
        text = pattern.sub(rf"\g<keep>{STRUCK}", text)
    return text


def redact_words(words: Sequence[str]) -> list[str]:
    """Redact the words of a command line: values whose option, variable or key names a secret (`--token VALUE`,
    `--token=VALUE`, `hub.token=VALUE`), and everything that `redact` detects in a word."""
    redacted = []
    passwords = passwords_in_words(words)
    for i, (option, word) in enumerate(zip(["", *words], words, strict=False)):
        name, equals, value = word.partition("=")
        if i in passwords:
            redacted.append(f"{redact(word[: passwords[i]])}{STRUCK}")
        elif option.startswith("-") and "=" not in option and _hides(option.lstrip("-"), word):
            redacted.append(STRUCK)
        elif value and " " not in name and _hides(name.lstrip("-+"), value):
            redacted.append(f"{redact(name)}{equals}{STRUCK}")
        elif re.fullmatch(_USER, option) and (name := word.partition(":")[0]) != word:
            redacted.append(re.sub(f"^{re.escape(name)}:{_PASSWORD}$", f"{redact(name)}:{STRUCK}", word))
        else:
            redacted.append(_redact_word(redact(word)))
    return redacted


def _hides(name: str, value: str) -> bool:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # accessToken
    if _MAYBE_NAME.search(name) is not None and re.fullmatch(_PLAIN, value) is None and not os.path.exists(value):
        return True
    return names_secret(name) or (_SIGNED_IN.search(name) is not None and not value.isdigit())


def _redact_word(word: str) -> str:
    for pattern in _IN_COMMANDS:
        word = pattern.sub(rf"\g<keep>{STRUCK}", word)
    if not re.search(r"\s", word):
        return word
    for begin, end in reversed(list(passwords_in_text(word))):
        word = word[:begin] + STRUCK + word[end:]
    return word


def names_secret(key: str) -> bool:
    """Return whether the name of a key or variable indicates a secret."""
    return _NAME.search(key) is not None and _SPECIAL.search(key) is None


def visible(text: str) -> str:
    """Escape control characters in a text (`\\x1b`), except tabs and newlines."""
    return _COMMANDS.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def printable(text: str, of_environment: tuple[str, ...] | None = None) -> str:
    """Redact a text and escape control characters, for a terminal or a log."""
    return visible(redact(text, of_environment))


def secrets_in_environment() -> tuple[str, ...]:
    """Return the secrets in this process's environment, longest first, also in URL-quoted form."""
    return _secrets_in(tuple(os.environ.items()))


@lru_cache(maxsize=1)
def _secrets_in(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    values = {value.strip() for name, value in variables if names_secret(name)}
    values |= {password for _, value in variables for password in _ADDRESSED.findall(value)}
    values |= {quote(value, safe="", errors="surrogateescape") for value in values}
    return tuple(sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True))


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
    """Return word index -> position at which a password begins in that word."""
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
    """Yield start and end of each password in a text that contains commands, such as the argument of `sh -c`."""
    if not _KNOWN.search(text):
        return
    matches = list(_WORD.finditer(text))
    words = [";" if match.group("end") else match.group() for match in matches]
    for i, start in passwords_in_words(words).items():
        yield matches[i].start() + start, matches[i].end()
