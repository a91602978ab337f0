"""A stranger who reaches a job's ports cannot make it load a pickle, or wait forever by staying silent; the ports of a
job on one machine are open on the loopback only."""

import contextlib
import io
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError

from lockstep.distributed import hang_watchdog, network, torch_internals
from lockstep.distributed import rendezvous as stores
from lockstep.distributed.rendezvous import Sealed, Unreached
from lockstep.distributed.world import World
from lockstep.launchers import torchrun
from lockstep.launchers.processes import elastic_rendezvous as meeting_state
from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous, Limits, Node, _parsed
from support.harness import run_on, tiny
from support.messages import mentions, raises

KEY = "0123456789abcdef0123456789abcdef"
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets through /proc")


class Code:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def rendezvous(port: int = 0, holds: bool = True, key: str = KEY, join: float = 20) -> ElasticRendezvous:
    return ElasticRendezvous(
        "127.0.0.1", port, 1, 2, Node("a", "127.0.0.1", 1, holds=holds), Limits(join, 1, 60), key=key
    )


def everywhere(raw: Any, met: ElasticRendezvous, value: bytes) -> None:
    """Write under every key that a machine reads before it trains, where torch kept its pickle too."""
    name = met.get_run_id()
    raw.set(f"torch.rendezvous.{name}", value)
    PrefixStore(f"lockstep-state-{name}", raw).set("state", value)


@pytest.mark.parametrize("key", [KEY, ""])
@pytest.mark.parametrize("how", [bytes, b64encode])
def test_a_foreign_pickle_is_not_loaded(tmp_path: Path, key: str, how: Any) -> None:
    first = rendezvous(key=key)
    attack = pickle.dumps(Code(tmp_path / "ran"))
    with pytest.raises(FileExistsError):  # the attack works where it is loaded
        (tmp_path / "ran").mkdir() or pickle.loads(attack)
    (tmp_path / "ran").rmdir()
    stranger = stores.connect_store("127.0.0.1", first.port, 5, 5)
    everywhere(stranger, first, how(attack))
    with raises("LS7028", error=RendezvousStateError):
        first.next_rendezvous()
    with raises("LS7028", error=RendezvousStateError):
        rendezvous(first.port, False, key).next_rendezvous()
    assert not (tmp_path / "ran").exists()


def test_a_seal_without_the_secret_opens_nothing_of_a_job_that_has_one() -> None:
    first = rendezvous()
    with raises("LS7028", "LOCKSTEP_SECRET is not the same on every machine", error=RendezvousStateError):
        rendezvous(first.port, False, "another secret of a stranger")
    with raises("LS7028", "this one has none", error=RendezvousStateError):
        rendezvous(first.port, False, "")


OTHER = "another secret of a stranger"
WAYS = [
    (KEY, OTHER, "LOCKSTEP_SECRET is not the same on every machine"),
    (KEY, "", "another machine has a LOCKSTEP_SECRET and this one has none"),
    ("", KEY, "this machine has a LOCKSTEP_SECRET and another one has none"),
]


@pytest.mark.parametrize(("theirs", "mine", "why"), WAYS)
def test_a_machine_with_another_secret_is_refused_by_name(
    theirs: str, mine: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rendezvous(key=theirs)
    monkeypatch.setenv("LOCKSTEP_SECRET", mine)
    monkeypatch.setattr(torchrun, "prestart", lambda *_: None)  # nothing is started
    options = ["launch.name=torchrun", "launch.machines=2", f"launch.rendezvous=127.0.0.1:{first.port}"]
    run = tiny(*options, "launch.processes=1")
    with raises("LS7435", "127.0.0.1:", why):
        torchrun.Torchrun().start(torchrun.Torchrun().plan(run))
    assert first.ended() is None  # the job is none the worse for it


def said_of_another(world: World, secrets: tuple[str, str]) -> str:
    os.environ["LOCKSTEP_SECRET"] = secrets[world.rank]
    try:
        world.join()
    except Unreached as caught:
        return str(caught)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(("theirs", "mine", "why"), WAYS)
def test_ranks_with_different_secrets_report_it(theirs: str, mine: str, why: str) -> None:
    """Ranks with different secrets, started without lockstep's launcher, each report it before any object is sent."""
    first, second = run_on(2, said_of_another, (theirs, mine), joined=False)
    assert mentions(second, "LS7041", "rank 1 of 2 on ", f"rank 0: {why}")
    assert first.startswith("rank 0 of 2 on ")
    assert run_on(2, said_of_another, (mine, mine), joined=False) == ["", ""]


def test_a_forged_end_is_one_message() -> None:
    first = rendezvous()
    raw = stores.connect_store("127.0.0.1", first.port, 5, 5)
    PrefixStore(f"lockstep-{first.get_run_id()}", raw).set("end", b'{"status": 0, "host": "b"}')
    end = first.ended()
    assert end is not None
    assert end.status == 1
    assert "'end' in the store is not signed" in end.text.replace(f"{first.get_run_id()}/", "")


def state(**values: Any) -> dict[str, Any]:
    """A well-formed state of one machine that is there."""
    node, now = ["stranger", 1, 0], "2199-01-01T00:00:00+00:00"
    lists = {"participants": [[*node, 0]], "wait_list": [], "redundancy_list": [], "last_heartbeats": [[*node, now]]}
    return {"round": 0, "complete": True, "deadline": None, "closed": False} | lists | values


@pytest.mark.parametrize(
    "forged",
    [
        state(round=-1),
        state(last_heartbeats=[]),
        state(wait_list=[["other", 1, 0]]),
        state(participants=[["stranger", 1, 0, 0], ["other", 1, 0, 0]]),
    ],
)
def test_an_invalid_state_is_reported(forged: dict[str, Any]) -> None:
    """Without a secret anyone can sign a state, so its content is checked too."""
    first = rendezvous(key="")
    text = json.dumps(forged).encode()
    key = f"{first.get_run_id()}/state/state"
    raw = stores.connect_store("127.0.0.1", first.port, 5, 5)
    PrefixStore(f"lockstep-state-{first.get_run_id()}", raw).set("state", network.seal("", key, text))
    with pytest.raises(RendezvousStateError, match="state is invalid"):
        first.next_rendezvous()


@pytest.mark.parametrize(
    "told",
    [
        {"host": "b", "address": 3, "processes": 1},
        {"host": "b", "address": "", "processes": "many"},
        {"host": "b", "address": "", "processes": 1, "step": []},
        {"other": 1},
        ["b"],
        3,
    ],
)
def test_an_invalid_machine_is_reported(told: Any) -> None:
    with pytest.raises(RendezvousStateError, match="unreadable data"):
        _parsed(Node, json.dumps(told).encode())


def test_all_errors_of_torch_elastic_about_inconsistent_data_become_one() -> None:
    first = rendezvous(key="")
    for wrong in (KeyError("a"), ValueError("b"), AttributeError("c"), TypeError("d"), OverflowError("e")):
        with pytest.raises(RendezvousStateError, match="wrote inconsistent data"), first.reading():
            raise wrong
    assert not first.gone
    with pytest.raises(RendezvousConnectionError), first.reading():
        raise RuntimeError("the store is gone")
    assert first.gone


@pytest.mark.parametrize(
    "text", [b"", b"[", b"3", b"{}", b'{"over": 0}', b'{"over": false}', b"[" * 100_000, b'{"over": true, "pid": 1}']
)
def test_an_invalid_heartbeat_is_reported(text: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="is not a heartbeat"):
        hang_watchdog.parsed(text)


def test_heartbeats_of_ranks_are_read() -> None:
    watching = hang_watchdog.Watchdog(World(tiny()), 5)
    watching._main = threading.get_ident()
    for stuck in (True, False):
        found = watching._beat(3, stuck)
        assert hang_watchdog.parsed(json.dumps(found).encode()) == found
    assert hang_watchdog.parsed(b'{"over": true}') == {"over": True}


@linux
@pytest.mark.processes
def test_only_a_process_of_the_same_launcher_is_ended() -> None:
    """Whoever writes a sign of life chooses the number that is in it."""
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert not hang_watchdog.sibling(other.pid)
        assert not any(hang_watchdog.sibling(pid) for pid in (-1, 0, 1, os.getppid(), 2**31))
        assert hang_watchdog.sibling(os.getpid())
    finally:
        other.kill()
        other.wait()


def test_signatures_are_valid_for_their_own_key_only() -> None:
    raw = dist.HashStore()
    store = Sealed(raw, "room", KEY)
    store.set("a", "1")
    assert store.get("a") == b"1"
    raw.set("b", raw.get("a"))  # moved by a stranger
    with pytest.raises(RendezvousStateError):
        store.get("b")
    with pytest.raises(RendezvousStateError):
        Sealed(raw, "another room", KEY).get("a")
    assert store.compare_set("c", "", "1") == b"1"
    assert store.compare_set("c", "", "2") == b"1"
    assert store.compare_set("c", "1", "2") == b"2"


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = ("round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats")


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60)
    | json_like.map(lambda v: json.dumps(v).encode())
    | st.fixed_dictionaries(dict.fromkeys(KEYS, json_like)).map(lambda v: json.dumps(v).encode())
)
def test_a_malformed_state_is_one_error(text: bytes) -> None:
    with contextlib.suppress(RendezvousStateError):  # and nothing else
        meeting_state._state(text)


@pytest.mark.parametrize("text", [b"", b"3", b'{"round": "many"}', b"[" * 100_000, pickle.dumps(3)])
def test_data_that_is_no_state_is_reported(text: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="state is invalid"):
        meeting_state._state(text)


def test_a_state_round_trips_through_text() -> None:
    first = rendezvous()
    first.next_rendezvous()
    state = first._state()
    again = meeting_state._state(meeting_state._text(state).encode())
    assert vars(again) == vars(state)
    assert state.participants


def test_objects_between_ranks_are_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = dist.distributed_c10d
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(module, name, getattr(module, name))
    torch_internals.seal_pickles(KEY)
    tensor, size = module._object_to_tensor({"a": (1, "two")}, "cpu", None)
    assert module._tensor_to_object(tensor, int(size), None) == {"a": (1, "two")}
    with pytest.raises(network.ForgedError):
        module._unpickler(io.BytesIO(pickle.dumps(Code(tmp_path / "ran")))).load()
    forged = network.seal("", "object", pickle.dumps(Code(tmp_path / "ran")))
    with pytest.raises(network.ForgedError):
        module._unpickler(io.BytesIO(forged)).load()
    assert not (tmp_path / "ran").exists()


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(network.SECRET_VARIABLE, "hunter2")
    with raises("LS7027", "16"):
        network.secret_from_environment()


def listening(port: int) -> set[str]:
    """Addresses, as the kernel writes them, on which something listens at a port."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    places = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


@linux
def test_one_machine_s_store_listens_on_the_loopback_alone() -> None:
    first = ElasticRendezvous("127.0.0.1", 0, 1, 1, Node("a", "127.0.0.1", 2, holds=True), Limits(), key=KEY)
    assert listening(first.port) == {"0100007F"}


@linux
def test_several_machines_connect_at_the_given_address() -> None:
    own = network.route_to(network.OUTSIDE) if len(network.interfaces()) > 1 else "127.0.0.1"
    store = stores.open_store(own, 0, own != "127.0.0.1", 5)
    written = socket.inet_aton(own)[::-1].hex().upper()
    assert listening(store.port) == {written}
    behind_a_name = stores.open_store(
        "127.0.0.1", 0, True, 5
    )  # others resolve the name to another address of this machine
    assert listening(behind_a_name.port) == {"00000000"}


def test_a_silent_peer_times_out() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, raises("LS7026", "1", error=network.NetworkError):
        rendezvous(silent.getsockname()[1], holds=False, join=1)
