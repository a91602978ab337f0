"""The state that torch's dynamic rendezvous keeps in a store, as sealed JSON instead of the pickle torch writes there.

In: a sealed store. Out: a `RendezvousBackend`. torch pickles its state before it gives it to a backend and unpickles
what it gets back: here it only ever gets back what this process has pickled itself.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

from lockstep.distributed.rendezvous import Sealed

_KEY, _GONE = "state", "excluded"
_COMES_IN = timedelta(seconds=3)  # looked at once a second
_EMPTY = "null"  # a key must be there to be asked for: what it holds before there is a state


class Backend(RendezvousBackend):
    """Keeps the state of one job of at most so many machines."""

    def __init__(self, store: Sealed, most: int) -> None:
        self._store, self._most = store, most
        self._ask("compare_set", _KEY, "", _EMPTY)
        self._ask("compare_set", _GONE, "", "[]")

    def exclude(self, host: str) -> None:
        """That machine is out of the job: one fewer may come from now on."""
        out = self._out()
        while host not in out:
            out = _hosts(self._ask("compare_set", _GONE, json.dumps(out), json.dumps([*out, host])))

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._answer(self._ask("get", _KEY))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        mine = _text(pickle.loads(state))  # this process's own, handed over a moment ago
        found = self._ask("compare_set", _KEY, token.decode() if isinstance(token, bytes) else _EMPTY, mine)
        answer = self._answer(found)
        return None if answer is None else (*answer, found == mine.encode())

    def _answer(self, found: bytes) -> tuple[bytes, Token] | None:
        if found == _EMPTY.encode():
            return None
        return pickle.dumps(_held_open(_state(found), self._most - len(self._out()))), found

    def _out(self) -> list[str]:
        """The machines that are out of the job. The store does not count them: its counters bear no seal, and over one
        that somebody has written into it hangs up, and nobody would know why."""
        return _hosts(self._ask("get", _GONE))

    def _ask(self, what: str, *words: str) -> bytes:
        with _reached():
            return bytes(getattr(self._store, what)(*words))


def _hosts(text: bytes) -> list[str]:
    try:
        return [_is(str, host) for host in _is(list, json.loads(text))]
    except (ValueError, TypeError, RecursionError):
        raise RendezvousStateError(f"which machines are out of the job cannot be read: {text!r:.80}") from None


def record_nothing(handler: DynamicRendezvousHandler) -> None:
    """Nobody reads the events that torch makes of every step of a rendezvous, every sign of life among them. For the
    name of a function each writes down the whole stack, twice, and looks through all imported modules for every frame
    without a file: milliseconds in most processes, a tenth of a second and more in one forked from a server that has
    imported everything."""
    inner: Any = handler
    for part in (inner, inner._op_executor, inner._state_holder):
        part._record = _nothing


def _nothing(*_: object, **__: object) -> None:
    pass


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, TimeoutError) as caught:
        raise RendezvousConnectionError(" ".join(str(caught).split())[:300]) from caught


def _held_open(state: _RendezvousState, most: int) -> _RendezvousState:
    """A formation is not complete while a machine that was seen waiting for it has not come in. torch elastic forms
    without one that is slow to, and a job that has saved for a machine's sake would end without it. One that gives no
    sign of life is taken off the list by whoever reads it. Where all have come that may, nobody is waited for."""
    if state.complete or state.deadline is None:
        return state
    if state.wait_list:
        state.deadline = max(state.deadline, datetime.now(UTC) + _COMES_IN)
    elif len(state.participants) >= most:
        state.deadline = datetime.now(UTC) - _COMES_IN
    return state


def _text(state: _RendezvousState) -> str:
    def node(found: _NodeDesc) -> list[str | int]:
        return [found.addr, found.pid, found.local_id]

    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": state.deadline.isoformat() if state.deadline else None,
            "closed": state.closed,
            "participants": [[*node(n), rank] for n, rank in state.participants.items()],
            "wait_list": sorted(map(node, state.wait_list)),
            "redundancy_list": sorted(map(node, state.redundancy_list)),
            "last_heartbeats": [[*node(n), when.isoformat()] for n, when in state.last_heartbeats.items()],
        }
    )


def _state(text: bytes) -> _RendezvousState:
    """Errors: `RendezvousStateError` for anything but what `_text` writes."""

    def node(found: list[Any]) -> _NodeDesc:
        address, process, number = found[:3]
        return _NodeDesc(_is(str, address), _is(int, process), _is(int, number))

    state = _RendezvousState()
    try:
        told = json.loads(text)
        state.round, state.complete = _is(int, told["round"]), _is(bool, told["complete"])
        state.closed = _is(bool, told["closed"])
        state.deadline = None if told["deadline"] is None else _time(told["deadline"])
        state.participants = {node(found): _is(int, found[3]) for found in told["participants"]}
        state.wait_list = {node(found) for found in told["wait_list"]}
        state.redundancy_list = {node(found) for found in told["redundancy_list"]}
        state.last_heartbeats = {node(found): _time(found[3]) for found in told["last_heartbeats"]}
        _possible(state)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as caught:
        raise RendezvousStateError(f"the state that machines meet through is no such state: {caught!r:.200}") from None
    return state


def _possible(state: _RendezvousState) -> None:
    """What torch elastic takes for granted. Errors: `ValueError`."""
    places = list(state.participants.values())
    if state.round < 0 or (state.complete and (len(set(places)) < len(places) or min(places, default=0) < 0)):
        raise ValueError("two machines have one place")
    if not {*state.participants, *state.wait_list, *state.redundancy_list} <= set(state.last_heartbeats):
        raise ValueError("a machine has given no sign of life")


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is not of type {kind.__name__}")
    return value


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"{text!r:.40} names no time zone")
    return found
