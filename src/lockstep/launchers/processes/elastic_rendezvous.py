"""The rendezvous of a job's machines: torch's c10d rendezvous with extensions.

In: an address, the allowed numbers of machines, and a description of this one. Out: for every formation of the job, the
order of machines and the failed ones; the end of the job, the same on every machine. A machine whose run differs is
rejected before it affects others.

The state of the rendezvous is stored as sealed JSON instead of torch's pickle: torch unpickles only data that this
process pickled. An evicted machine (`sdc_check.on_difference: evict`) is not readmitted: the others re-form at once and
expect one machine less; it keeps the store and the lock of OUTPUT until the job is over.
"""

from __future__ import annotations

import ipaddress
import json
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, get_type_hints

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousState,
)

from lockstep.config.errors import STOPPED
from lockstep.config.run import RunError
from lockstep.distributed import network, rendezvous
from lockstep.distributed.membership import Roster
from lockstep.distributed.rendezvous import Sealed
from lockstep.training.consistency_check import disagreement

_KEY, _GONE = "state", "excluded"
_COMES_IN = timedelta(seconds=3)  # checked once a second
_EMPTY = "null"  # initial value: a key must exist to be read


class Backend(RendezvousBackend):
    """Rendezvous backend with the state of one job of at most `most` machines."""

    def __init__(self, store: Sealed, most: int) -> None:
        self._store, self._most = store, most
        self._ask("compare_set", _KEY, "", _EMPTY)
        self._ask("compare_set", _GONE, "", "[]")

    def exclude(self, host: str) -> None:
        """Exclude a machine from the job, which then expects one machine less."""
        out = self._out()
        while host not in out:
            out = _hosts(self._ask("compare_set", _GONE, json.dumps(out), json.dumps([*out, host])))

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._answer(self._ask("get", _KEY))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        mine = _text(pickle.loads(state))  # pickled by this process just before
        stored = self._ask("compare_set", _KEY, token.decode() if isinstance(token, bytes) else _EMPTY, mine)
        answer = self._answer(stored)
        return None if answer is None else (*answer, stored == mine.encode())

    def _answer(self, stored: bytes) -> tuple[bytes, Token] | None:
        if stored == _EMPTY.encode():
            return None
        return pickle.dumps(_held_open(_state(stored), self._most - len(self._out()))), stored

    def _out(self) -> list[str]:
        """Return the excluded machines. A store counter would not be sealed, and a corrupted one closes the connection
        without explanation."""
        return _hosts(self._ask("get", _GONE))

    def _ask(self, what: str, *words: str) -> bytes:
        with _reached():
            return bytes(getattr(self._store, what)(*words))


def _hosts(text: bytes) -> list[str]:
    try:
        return [_is(str, host) for host in _is(list, json.loads(text))]
    except (ValueError, TypeError, RecursionError):
        raise RendezvousStateError(f"the list of evicted machines cannot be read: {text!r:.80}") from None


def record_nothing(handler: DynamicRendezvousHandler) -> None:
    """Disable torch's events of each rendezvous operation, including heartbeats. Each inspects the whole stack twice,
    which takes milliseconds in most processes, but 0.1 s or more when forked from a server with all imports."""
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
    """Keep a formation open while a machine that was waiting for it has not joined, up to `most` machines.

    torch elastic would form without a slow machine, for which the job has just saved a checkpoint. Readers remove
    machines without heartbeats from the list."""
    if state.complete or state.deadline is None:
        return state
    if state.wait_list:
        state.deadline = max(state.deadline, datetime.now(UTC) + _COMES_IN)
    elif len(state.participants) >= most:
        state.deadline = datetime.now(UTC) - _COMES_IN
    return state


def _text(state: _RendezvousState) -> str:
    def node(node_desc: _NodeDesc) -> list[str | int]:
        return [node_desc.addr, node_desc.pid, node_desc.local_id]

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
    """Parse the output of `_text`. Errors: `RendezvousStateError` for anything else."""

    def node(fields: list[Any]) -> _NodeDesc:
        address, process, number = fields[:3]
        return _NodeDesc(_is(str, address), _is(int, process), _is(int, number))

    state = _RendezvousState()
    try:
        fields_of_state = json.loads(text)
        state.round, state.complete = _is(int, fields_of_state["round"]), _is(bool, fields_of_state["complete"])
        state.closed = _is(bool, fields_of_state["closed"])
        state.deadline = None if fields_of_state["deadline"] is None else _time(fields_of_state["deadline"])
        state.participants = {node(fields): _is(int, fields[3]) for fields in fields_of_state["participants"]}
        state.wait_list = {node(fields) for fields in fields_of_state["wait_list"]}
        state.redundancy_list = {node(fields) for fields in fields_of_state["redundancy_list"]}
        state.last_heartbeats = {node(fields): _time(fields[3]) for fields in fields_of_state["last_heartbeats"]}
        _possible(state)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as caught:
        raise RendezvousStateError(f"the rendezvous state is invalid: {caught!r:.200}") from None
    return state


def _possible(state: _RendezvousState) -> None:
    """Check invariants that torch elastic assumes. Errors: `ValueError`."""
    places = list(state.participants.values())
    if state.round < 0 or (state.complete and (len(set(places)) < len(places) or min(places, default=0) < 0)):
        raise ValueError("two machines have the same rank")
    if not {*state.participants, *state.wait_list, *state.redundancy_list} <= set(state.last_heartbeats):
        raise ValueError("a machine has sent no heartbeat")


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is not of type {kind.__name__}")
    return value


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r:.40} names no time zone")
    return moment


@dataclass(frozen=True)
class Node:
    """Description of a machine in a formation."""

    host: str
    address: str  # reachable by the other machines
    processes: int
    place: int | None = None  # requested position: `launch.node_rank`
    holds: bool = False  # whether it holds the store
    continues: bool = False  # whether `launch.on_rank_failure` is continue
    step: int = 0  # of the newest checkpoint in its OUTPUT

    @property
    def precedence(self) -> tuple[Any, ...]:
        """Sort key: newest checkpoint first (rank 0 writes OUTPUT), then the requested position, then the store's
        machine."""
        place = float("inf") if self.place is None else self.place
        return (-self.step, place, not self.holds, _number(self.address), self.host)


_MARGIN_S = 5.0  # for the round that detects the end of the last call


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds."""

    join: float = 600.0  # until enough machines are there
    more: float = 30.0  # for more machines to come once the fewest are there
    lost: float = 15.0  # without a heartbeat until a machine counts as failed

    def meeting(self, fewest: int, most: int) -> float:
        """Return the timeout of a rendezvous in seconds. Adds the wait for further machines to that for the fewest:
        torch counts both from the start, and would give up while waiting for more."""
        return self.join + (self.more + _MARGIN_S if fewest < most else 0.0)


@dataclass(frozen=True)
class End:
    """The end of the job, as published by the first machine that knew."""

    status: int
    host: str
    text: str = ""


class ElasticRendezvous:
    """Rendezvous handler for torch elastic. Its methods raise `RendezvousError`s like torch's."""

    use_agent_store = False  # each formation has its own store, on the machine of rank 0 (pytorch#135712)

    def __init__(
        self,
        at: str,
        port: int,
        fewest: int,
        most: int,
        node: Node,
        limits: Limits,
        newest: Callable[[], int] = lambda: 0,
        key: str | None = None,
    ) -> None:
        """Open the store at `at:port` if this is its machine, else connect to it. `newest`: returns the step of this
        machine's newest checkpoint. `key`: the job's secret; default: from the environment. Errors: `NetworkError`,
        `RendezvousConnectionError`, `RendezvousStateError`."""
        self.at, self.fewest, self.most, self.limits = at, fewest, most, limits
        self._node, self._newest = node, newest
        self.nodes: list[Node] = []  # machines of this formation, in rank order
        self.place = 0  # index of this machine
        self.gone = False  # whether the store is gone
        self.holds = node.holds
        self.continues = False  # whether this machine continues after rank failures
        self._key = network.secret_from_environment() if key is None else key
        timeout_s = max(limits.lost, 10)
        try:
            if node.holds:
                self._store: Any = rendezvous.open_store(at, port, most > 1, timeout_s)
            else:
                self._store = rendezvous.connect_store(at, port, limits.join, timeout_s)
            number = self._store.add("lockstep-job", 0)  # a store may outlive a job: jobs are numbered
            jobs = Sealed(self._store, "jobs", self._key)
            name = jobs.compare_set(f"lockstep-name-{number}", "", uuid.uuid4().hex).decode()
        except (ValueError, RuntimeError) as caught:
            raise RendezvousConnectionError(" ".join(str(caught).split())[:300]) from caught
        self.port = int(self._store.port)
        network.end_silent(self.port, limits.lost)
        self._number = number
        self._job = Sealed(PrefixStore(f"lockstep-{name}", self._store), name, self._key)
        state_store = Sealed(PrefixStore(f"lockstep-state-{name}", self._store), f"{name}/state", self._key)
        self._backend = Backend(state_store, most)
        self._inner = DynamicRendezvousHandler.from_backend(
            name,
            self._store,
            self._backend,
            fewest,
            most,
            node.address,
            RendezvousTimeout(
                *(timedelta(seconds=each) for each in (limits.meeting(fewest, most), limits.more, 10, 5))
            ),
            keep_alive_interval=max(1, round(limits.lost / 3)),
            keep_alive_max_attempt=3,
        )
        record_nothing(self._inner)
        inner: Any = self._inner
        inner._get_store = lambda: Sealed(  # for the introductions of a round
            inner._wrap_store(self._store), f"{name}/{inner._state_holder.state.round}", self._key
        )
        self._nodes: set[Any] = set()
        self._missing: tuple[set[Any], float] = set(), 0.0
        self._asked_at = 0.0

    # -- interface of torch elastic ----------------------------------------------------------------------------------

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def next_rendezvous(self) -> RendezvousInfo:
        """Form a group with the other machines, and agree on their order."""
        info = self._call(self._inner.next_rendezvous)
        while info.rank >= info.world_size or not self._wait_for(
            keys := self._introduce(info), 2 * self.limits.lost, self._round
        ):
            info = self._call(self._inner.next_rendezvous)  # a machine has just failed
        texts = self._call(lambda: self._round.multi_get(keys))
        nodes = [_parsed(Node, text) for text in texts]
        order = sorted(range(len(nodes)), key=lambda rank: nodes[rank].precedence)
        self.nodes, self.place = [nodes[rank] for rank in order], order.index(info.rank)
        first: Any = self._round.within("first")
        where = self._call(lambda: RendezvousStoreInfo.build(self.place, first, self._node.address))
        return RendezvousInfo(info.store, self.place, len(nodes), where)

    def num_nodes_waiting(self) -> int:
        return int(self._call(self._inner.num_nodes_waiting))

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def shutdown(self) -> bool:
        """Close the job to further machines. The store may continue to serve another job."""
        if self.gone:
            return False
        try:
            if self._store.add(f"lockstep-over-{self._number}", 1) == 1:
                self._store.add("lockstep-job", 1)
            closed = self._inner.shutdown()
            if self._node.holds and (outside := self._state().wait_list | self._state().redundancy_list):
                self._wait_for([_told_key(node.addr, node.pid) for node in outside], self.limits.lost, self._job)
            return closed
        except (RuntimeError, RendezvousConnectionError):  # the store's machine has left already
            return False

    def acknowledge_end(self) -> None:
        """Acknowledge the end of the job on a waiting machine, so that the store's machine need not wait for it."""
        try:
            self._job.set(_told_key(self._node.address, os.getpid()), "1")
        except RuntimeError:
            self.gone = True

    # -- extensions --------------------------------------------------------------------------------------------------

    def admit(self, facts: dict[str, str]) -> None:
        """Compare this machine's facts with the first machine's. Errors: `RunError`; with a fixed number of machines
        the others end with the same message, else they continue without this one."""
        self.refuse()
        mine = json.dumps([self._node.host, facts], sort_keys=True)
        first = self._call(lambda: self._job.compare_set("facts", "", mine)).decode()
        host, theirs = _parsed(_facts, first)
        if not (text := disagreement([(host, theirs), (self._node.host, facts)])):
            return
        self._call(self._inner.num_nodes_waiting)  # updates the heartbeats of the others
        state = self._state()
        if not state.participants and not state.wait_list:  # remains of a killed job
            self._call(lambda: self._job.set("facts", mine))
            return
        if self.fewest == self.most:
            self.end(2, text)
            self.shutdown()
        raise RunError.read(text)

    def roll(self, namespace: str, key: str, members: list[str] | None) -> Roster:
        """Return a roster of ranks in this store."""
        return Roster(self._store, namespace, key, members)

    @property
    def round(self) -> int:
        """The number of this formation (round)."""
        return int(self._state().round)

    def announce(self, namespace: str) -> None:
        """Publish the namespace in which new machines may join this formation as it is; empty: they may not."""
        self._call(lambda: self._job.set("namespace", json.dumps([self.round, namespace, len(self.nodes)])))

    def announced(self) -> tuple[int, str, int]:
        """Return the last announcement: (number of the formation, its namespace, number of its machines)."""
        if not self._call(lambda: self._job.check(["namespace"])):
            return -1, "", 0
        number, namespace, count = self._call(lambda: json.loads(self._job.get("namespace")))
        return int(number), str(namespace), int(count)

    def formed_by_others(self) -> bool:
        """Return whether a formation without this machine exists, which it may join from now on."""
        self._call(self._inner.num_nodes_waiting)  # updates the state
        state = self._state()
        self._round: Any = self._inner._get_store()
        return bool(state.complete and state.participants and self._inner._this_node not in state.participants)

    def lost(self) -> list[str]:
        """Return the hosts of this formation without recent heartbeats, by the last state from `num_nodes_waiting`."""
        state = self._state()
        missing = self._nodes - set(state.participants) - set(state.wait_list) if not state.closed else set()
        now = time.monotonic()
        if missing != self._missing[0]:
            self._missing = missing, now  # a machine may be moving from one list to the other
        if not missing or now - self._missing[1] < 2.5:
            return []
        addresses = {node.addr for node in missing}
        return [node.host for node in self.nodes if node.address in addresses]

    def grow(self) -> None:
        """Announce that ranks ending with status 75 do so because the job re-forms. Visible to the others on return:
        `add` waits for the store's answer, `set` would not."""
        self._call(lambda: self._round.add("grows", 1))

    def grows(self) -> bool:
        return bool(self._call(lambda: self._round.check(["grows"])))

    def end(self, status: int, text: str = "") -> None:
        """Publish how the job ends, unless another machine has. Does not raise if the store is gone."""
        word = json.dumps(asdict(End(status, self._node.host, text)))
        try:
            self._job.compare_set("end", "", word)
        except RendezvousStateError:  # forged: the others cannot read it either
            pass
        except RuntimeError:
            self.gone = True

    def ended(self, at_once: bool = True) -> End | None:
        """Return how the job ended on another machine, or None. Queries at most once a second, unless `at_once`."""
        now = time.monotonic()
        if not at_once and now - self._asked_at < 1.0:
            return None
        self._asked_at = now
        try:
            if not self._job.check(["end"]):
                return None
            end: End = _parsed(End, self._job.get("end"))
        except RendezvousStateError as caught:
            return End(1, self.at, str(caught))
        except RuntimeError:
            self.gone = True
            return None
        return end if end.host != self._node.host else None

    def leave_together(self, limit_s: float = float("inf")) -> None:
        """Wait until the ranks of every machine have ended, because one machine holds the store. Does not wait for
        failed machines, or if the store is gone."""
        if not self.nodes:
            return
        until = time.monotonic() + limit_s
        everyone = range(len(self.nodes))
        try:
            self._round.set(f"done/{self.place}", "1")
            while not self._round.check([f"done/{place}" for place in everyone]):
                self.num_nodes_waiting()
                if self.lost() or time.monotonic() > until:
                    return
                time.sleep(0.1)
            self._round.set(f"left/{self.place}", "1")
            until = min(until, time.monotonic() + 5)
            while self._node.holds and time.monotonic() < until:
                if self._round.check([f"left/{place}" for place in everyone]):
                    return
                time.sleep(0.05)
        except (RuntimeError, RendezvousError):
            self.gone = True

    def there(self) -> list[str]:
        """Return the addresses of the joined machines, for messages: also this one's, which torch has removed by the
        time that it raises because too few machines joined."""
        return sorted({node.addr for node in self._state().participants} | {self._node.address})

    def _introduce(self, info: RendezvousInfo) -> list[str]:
        """Publish this machine's description, and return the keys of those of all machines in this formation."""
        self._nodes, self._missing = set(self._state().participants), (set(), 0.0)
        self._round = info.store
        mine = asdict(self._node) | {"step": self._newest(), "continues": self.continues}
        self._call(lambda: self._round.set(f"machine/{info.rank}", json.dumps(mine)))
        return [f"machine/{rank}" for rank in range(info.world_size)]

    # -- eviction ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the job for good."""
        inner: Any = self._inner
        self._call(lambda: self._job.add(f"excluded/{self._node.host}", 1))
        self._call(lambda: self._backend.exclude(self._node.host))
        inner._stop_heartbeats()
        until = inner._get_deadline(timedelta(seconds=10))
        self._call(lambda: inner._op_executor.run(_RendezvousExitOp(), until))

    def refuse(self) -> None:
        """Check that this machine was not evicted. Errors: `RunError`."""
        if self._call(lambda: self._job.check([f"excluded/{self._node.host}"])):
            raise RunError(
                "LS7330", f"{self._node.host} was evicted from this job, because it computed wrong values (sdc_check)"
            )

    def hold(self, stop_requested: Callable[[], bool]) -> None:
        """After `leave`, keep the store and the lock of OUTPUT, if this machine has them, until the job is over.
        `stop_requested`: returns whether a stop was requested on this machine."""
        inner: Any = self._inner
        last_activity = time.monotonic()
        while (self._node.holds or self._node.place == 0) and not self.is_closed():
            if self.num_nodes_waiting() or inner._state_holder.state.participants:
                last_activity = time.monotonic()
            elif time.monotonic() - last_activity > self.limits.join:
                return  # no machine is left
            if stop_requested():
                self.end(STOPPED, "stopped on request")
            time.sleep(0.5)
        time.sleep(2)  # until all others have read it

    # -- internals ---------------------------------------------------------------------------------------------------

    def _state(self) -> Any:
        return self._inner._state_holder.state

    def _call(self, ask: Callable[[], Any]) -> Any:
        with self.reading():
            return ask()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager around torch elastic's use of data from other machines, which it trusts. Errors:
        `RendezvousError`, also for invalid data."""
        try:
            yield
        except RendezvousConnectionError:
            self.gone = True
            raise
        except RuntimeError as caught:
            self.gone = True
            raise RendezvousConnectionError(" ".join(str(caught).split())[:300]) from caught
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError) as caught:
            raise RendezvousStateError(f"another machine wrote inconsistent data: {caught!r:.200}") from caught

    def _wait_for(self, keys: list[str], limit_s: float, store: Sealed) -> bool:
        """Wait for keys by polling, because heartbeats need the store's connection. Returns whether they were set."""
        until = time.monotonic() + limit_s
        while not self._call(lambda: store.check(keys)):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True


def serve(host: str, port: int) -> Any:
    """Open a store for jobs, which lives as long as the returned object. Errors: `NetworkError`."""
    if not network.holds(host, port):
        raise network.NetworkError(
            "LS7331", f"{host}:{port} cannot be opened: it is not an address of this machine, or it is in use"
        )
    return rendezvous.open_store(host, port, True, 30)


def _parsed(kind: Callable[..., Any], text: bytes) -> Any:
    """Parse JSON from another machine into a dataclass (from an object or a list), checking types. Errors:
    `RendezvousStateError`."""
    try:
        values = json.loads(text)
        value = kind(**values) if isinstance(values, dict) else kind(*values)
        for name, annotation in get_type_hints(kind).items() if is_dataclass(kind) else ():
            if not isinstance(getattr(value, name), annotation):
                raise TypeError(f"{name} is {getattr(value, name)!r:.80}")
        return value
    except (ValueError, TypeError, RecursionError) as caught:
        raise RendezvousStateError(f"another machine wrote unreadable data: {caught!r:.200}") from None


def _facts(host: str, facts: dict[str, str]) -> tuple[str, dict[str, str]]:
    return str(host), {str(name): str(value) for name, value in dict(facts).items()}


def _told_key(address: str, process: int) -> str:
    return f"told/{address}/{process}"


def _number(address: str) -> tuple[int, int]:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (9, 0)
    return (parsed.version, int(parsed))
