"""What may leave this process as text: secrets are struck out, and characters that command a terminal are made visible.

In: any text, such as a person's data, a library's error, a path. Out: the same text without what looks like a token, a
key or a password, and without what is one in this process's environment. Every sink calls this: the terminal, log.txt,
tracebacks, events, samples, trackers, the report, the model card; run.yaml is not written with a secret in it. No
pattern finds a password that looks like a word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

STRUCK = "***"
_SHORTEST = 8  # characters of a variable's value that is struck out wherever it is found: shorter ones are words
_NO_WORD = 16  # and of one with which a run file is refused: a weak password may be the name of a project, too
# What tokens and keys look like, by who gives them out.
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
_TOKEN = re.compile("(?<![A-Za-z0-9])(?:" + "|".join(_TOKENS) + ")|-----BEGIN [A-Z ]*PRIVATE KEY")
# scheme://user:password@host, also with an @ in the password, and a token alone before the @
_ADDRESS = re.compile(r"(?P<keep>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^\s/@:\"']*:[^\s/\"']+|[^\s/@:\"']{20,})(?=@)")
_ADDRESSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:\"']*:([^\s/\"']+)@")  # the password alone
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
# Whose token it may be: others, such as pad_token, are words of a tokenizer.
_WHOSE = "hf|hub|huggingface|auth|access|api|bearer|refresh|session|bot|github|gitlab|wandb|slack"
_SPECIAL_TOKENS = "pad|eos|bos|unk|sep|cls|mask|start|end|additional_special"  # of a tokenizer
# NAME=value of a variable or an argument, and 'name': 'value' of a mapping
_ASSIGNED = re.compile(
    rf"(?P<keep>\b(?:(?-i:(?:[A-Z][A-Z0-9_]*_)?(?:TOKEN|CREDENTIALS?|{_WORDS}))|(?:\w+_)?(?:{_WORDS}|(?:{_WHOSE})_token))"
    r"(?:\s?=\s?|[\"']\s?:\s?(?=[\"'])))(?!\*\*\*|[\"']\*\*\*|\.\.\.)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)",
    re.IGNORECASE,
)
# name: value of a YAML file or a table of one, where the name is more than a word, in small letters
_LISTED = re.compile(
    rf"(?P<keep>(?<![\w.-])(?:[a-z0-9]+[_-])*(?:[a-z0-9]+[_-](?:{_WORDS.lower()})|(?:{_WHOSE})[_-]token|api_?key):\s+)"
    r"(?!\*\*\*|\.\.\.|(?:null|none|true|false)\b)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;)]+)"
)
# Authorization: Bearer value, of a header
_BEARER = re.compile(r"(?P<keep>\bAuthorization:\s*(?:Bearer|Basic|token)\s+)(?!\*\*\*)[^\s\"']+", re.IGNORECASE)
# --password value and --token=value, of a command line
_OPTION = re.compile(
    rf"(?P<keep>(?<![\w-])--(?!(?:{_SPECIAL_TOKENS})[_-]token)(?:[a-z0-9]+[_.-])*(?:{_WORDS}|token)(?:\s+|=))"
    r"(?!\*\*\*|(?-i:[A-Z_]+\b)|-)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)",
    re.IGNORECASE,
)
_PATTERNS = (_ADDRESS, _QUERY, _ASSIGNED, _LISTED, _BEARER, _OPTION)
_NAME = re.compile(rf"(^|[_.-])(token|credentials?|{_WORDS})$", re.IGNORECASE)
_SPECIAL = re.compile(rf"(^|[_.-])({_SPECIAL_TOKENS})[_-]token$", re.IGNORECASE)
# C0 but for tab and newline, DEL, C1; what turns the direction of text; what only some programs take for a line's end;
# halves of characters, which no file takes
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def redact(text: str) -> str:
    """The text with *** instead of secrets."""
    for value in secrets_in_environment():
        text = text.replace(value, STRUCK)
    text = _TOKEN.sub(STRUCK, text)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<keep>{STRUCK}", text)
    return text


def redact_all(values: Any, filtered: Callable[[str], str] = redact) -> Any:
    """Redact every text in mappings and lists, keys as well, and every value whose key names a secret. `filtered`: the
    function that is applied to each text, by default `redact`."""
    if isinstance(values, str):
        return filtered(values)
    if isinstance(values, dict):
        return {
            filtered(k) if isinstance(k, str) else k: STRUCK if kept_secret(k, v) else redact_all(v, filtered)
            for k, v in values.items()
        }
    return [redact_all(value, filtered) for value in values] if isinstance(values, list | tuple) else values


def redact_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without secrets: the value of each option, variable or key whose name says that it
    is one (`--token VALUE`, `--token=VALUE`, `hub.token=VALUE`), and whatever `redact` finds in a word."""
    redacted = []
    for option, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if option.startswith("-") and "=" not in option and names_secret(option.lstrip("-")):
            redacted.append(STRUCK)
        elif value and " " not in name and names_secret(name.lstrip("-+")):
            redacted.append(f"{name}{equals}{STRUCK}")
        else:
            redacted.append(redact(word))
    return redacted


def names_secret(key: str) -> bool:
    """Whether what a key or variable is called says that it holds a secret."""
    return _NAME.search(key) is not None and _SPECIAL.search(key) is None


def kept_secret(key: Any, value: Any) -> bool:
    """Whether a key says that its value, a text or a number, is a secret. A number of tokens is none."""
    if not isinstance(key, str) or isinstance(value, bool) or not names_secret(key):
        return False
    return bool(value) if isinstance(value, str) else isinstance(value, int | float) and key[-5:].lower() != "token"


def holds_secret(text: str, of_environment: tuple[str, ...] | None = None) -> bool:
    """Whether a text holds what looks like a secret, or a value of this process's environment that is a secret and no
    plain word. Redacted values do not count. `of_environment`: the result of `secrets_in_environment`, for callers with
    many texts."""
    values = secrets_in_environment() if of_environment is None else of_environment
    return (
        _TOKEN.search(text) is not None
        or any(len(value) >= _NO_WORD and value in text and not os.path.exists(value) for value in values)
        or any(STRUCK not in match.group() for pattern in _PATTERNS for match in pattern.finditer(text))
    )


def visible(text: str) -> str:
    """The text with control characters written out, `\\x1b` for an escape; tabs and newlines stay."""
    return _COMMANDS.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """As a terminal or a log may have it."""
    return visible(redact(text))


def one_line(text: object, most: int) -> str:
    """What an error says, on one line of at most `most` characters. Struck first: half a secret looks like none."""
    return redact(" ".join(str(text).split()))[:most]


def secrets_in_environment() -> tuple[str, ...]:
    """Secrets in this process's environment, longest first, each also as it stands in an address."""
    return _secrets_in(tuple(os.environ.items()))


@lru_cache(maxsize=1)
def _secrets_in(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    values = {value.strip() for name, value in variables if names_secret(name)}
    values |= {password for _, value in variables for password in _ADDRESSED.findall(value)}
    values |= {quote(value, safe="", errors="surrogateescape") for value in values}
    return tuple(sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True))
