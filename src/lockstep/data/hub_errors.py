"""What went wrong with the Hub, in a sentence: the libraries that speak to it wrap its answers in long ones.

In: an exception of huggingface_hub, datasets or transformers. Out: a sentence that says what to do, and whether trying
again may help. Imports huggingface_hub only when called.
"""

from __future__ import annotations

from collections.abc import Iterator

# Answers that say "not now": time-outs, conflicts of two commits, too many requests, and the Hub's own failures.
_AGAIN = (408, 409, 412, 425, 429, 500, 502, 503, 504)
_STATUS = {
    401: "it does not accept the token (401): HF_TOKEN is wrong or has expired",
    402: "it wants to be paid for this (402)",
    403: "the token may not do this (403): it needs the permission, or the repository's owner must give access",
    413: "it says that a file is too large (413)",
    429: "it says that there were too many requests (429)",
}


def explained(error: BaseException, revision: str | None = None) -> str:
    """One sentence about a failure. `revision`: what was asked for."""
    from huggingface_hub import constants, errors

    for each in _chain(error):
        if isinstance(each, errors.GatedRepoError):
            return "it is gated: ask for access on its page, and set HF_TOKEN to a token of the account that has it"
        if isinstance(each, errors.RevisionNotFoundError):
            return f"it has no revision {revision!r}" if revision else "it has no such revision"
        if isinstance(each, errors.RepositoryNotFoundError):
            return "the Hub has no such repository, or it is private and HF_TOKEN is not a token that may read it"
        if isinstance(each, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set, and it is not in the cache"
    if (status := status_of(error)) is not None:
        if status in _STATUS:
            return _STATUS[status]
        said = next((e for e in _chain(error) if isinstance(e, errors.HfHubHTTPError)), error)
        return f"it answered {status}: {one_line(getattr(said, 'server_message', None) or said)}"
    if any(_lost(each) for each in _chain(error)):
        return f"the Hub at {constants.ENDPOINT} cannot be reached: {one_line(list(_chain(error))[-1])}"
    return one_line(error)


def transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    status = status_of(error)
    return status in _AGAIN if status is not None else any(_lost(each) for each in _chain(error))


def unreached(error: BaseException) -> bool:
    """Whether the Hub could not be asked: it, or the network, is not there, or HF_HUB_OFFLINE is set."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return transient(error) or any(isinstance(each, OfflineModeIsEnabled) for each in _chain(error))


def status_of(error: BaseException) -> int | None:
    """The HTTP status that the Hub answered with, if it answered."""
    from huggingface_hub.errors import HfHubHTTPError

    answers = [each.response for each in _chain(error) if isinstance(each, HfHubHTTPError)]
    return next((int(answer.status_code) for answer in answers if answer is not None), None)


def one_line(text: object, most: int = 300) -> str:
    """A text without line breaks, cut where it gets long."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else line[: most - 3] + "..."


def _lost(error: BaseException) -> bool:
    """Whether the connection failed, whichever library says so (huggingface_hub 2 has another httpx than 1)."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"TransportError", "ConnectionError", "TimeoutError"})


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
