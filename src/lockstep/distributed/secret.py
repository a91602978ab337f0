"""The secret that the machines of a job share, and the seal it puts on what they tell each other.

In: `LOCKSTEP_SECRET`, given by whoever starts the job, or made by a launcher that hands it to all of its ranks. Out: an
HMAC over everything that travels through a store, checked before anything is parsed. Without a secret the seal is one
that anybody can make: it finds damage and machines that do not have the secret, and keeps nobody out. docs/security.md
says what that leaves open. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from lockstep.config.run import RunError

VARIABLE = "LOCKSTEP_SECRET"
SHORTEST = 16  # characters
_TAG = 64  # of a seal, in hexadecimal digits


class ForgedError(Exception):
    """Something that bears no seal of this job: one message for the user."""


def from_environment() -> str:
    """The job's secret, or "" where there is none. Errors: `RunError` for one that can be guessed."""
    value = os.environ.get(VARIABLE, "").strip()
    if value and len(value) < SHORTEST:
        raise RunError(f"{VARIABLE}: shorter than {SHORTEST} characters; `openssl rand -hex 32` prints a good one")
    return value


def from_environment_or_new() -> str:
    """The job's secret; a fresh one where none is given. For launchers that hand it to every rank themselves."""
    return from_environment() or secrets.token_hex(32)


def sealed(secret: str, name: str, content: bytes) -> bytes:
    """`content` under a seal that holds for this name only, so that nothing can be moved to another place."""
    return _tag(secret, name, content) + content


def opened(secret: str, name: str, message: bytes) -> bytes:
    """The message that `sealed` was given. Errors: `ForgedError`."""
    if (why := difference(secret, name, message)) is not None:
        raise ForgedError(f"{name!r} in the store bears no seal of this job: {why}, or somebody else writes there")
    return message[_TAG:]


def difference(secret: str, name: str, message: bytes) -> str | None:
    """Why what `message` was sealed with is most likely not this secret; None where it is."""
    tag, content = message[:_TAG], message[_TAG:]
    if hmac.compare_digest(tag, _tag(secret, name, content)):
        return None
    if not secret:
        return f"another machine has a {VARIABLE} and this one has none"
    if hmac.compare_digest(tag, _tag("", name, content)):
        return f"this machine has a {VARIABLE} and another one has none"
    return f"{VARIABLE} is not the same on every machine"


def _tag(secret: str, name: str, content: bytes) -> bytes:
    name_bytes = name.encode()
    return (
        hmac.new(secret.encode(), b"%d:%b:%b" % (len(name_bytes), name_bytes, content), hashlib.sha256)
        .hexdigest()
        .encode()
    )
