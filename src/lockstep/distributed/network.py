"""Addresses and interfaces that lead from this machine to another one, and the seal on what machines tell each other.

In: a host and a port; `LOCKSTEP_SECRET`, given by whoever starts the job, or made by a launcher that hands it to all of
its ranks. Out: addresses and names of interfaces, or a `NetworkError` that names what cannot be reached; an HMAC over
everything that travels through a store, checked before anything is parsed. Without a secret the seal is one that
anybody can make: it finds damage and machines that do not have the secret, and keeps nobody out.
docs/explanation/security.md says what that leaves open. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator

from lockstep.config.errors import CodedError
from lockstep.config.run import RunError

OUTSIDE = "192.0.2.1"  # TEST-NET-1 (RFC 5737): nothing is sent there, it only asks for the default route


class NetworkError(CodedError):
    """A host that has no address, cannot be reached, or an interface that is not there: one message for the user."""


@contextlib.contextmanager
def under_key(key: str) -> Iterator[None]:
    """A context in which a `NetworkError` becomes a `RunError` that names a key of the run file."""
    try:
        yield
    except NetworkError as caught:
        raise RunError(caught.code, f"{key}: {caught.message}") from None


def endpoint(text: str) -> tuple[str, int]:
    """`host:port`, also `[::1]:port`. Errors: `NetworkError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise NetworkError("LS7020", f"invalid address {text!r}; expected host:port")
    return host, int(port)


def address_of(host: str) -> str:
    """The first address a name has, IPv4 before IPv6. Errors: `NetworkError`, naming the host."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as caught:
        raise NetworkError(
            "LS7021",
            f"the host {host!r} has no address on {socket.gethostname()}: {getattr(caught, 'strerror', caught)}; use "
            f"an IP address, or a name that this machine resolves",
        ) from None
    return str(min(addresses, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def route_to(host: str) -> str:
    """This machine's own address on the way to `host`; nothing is sent. Errors: `NetworkError`."""
    address = address_of(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as caught:
            known = ", ".join(f"{name} {own}" for name, own in interfaces().items()) or "none"
            raise NetworkError(
                "LS7022",
                f"{socket.gethostname()} has no route to {host}{'' if address == host else f' ({address})'}: "
                f"{caught.strerror}; its interfaces are {known}",
            ) from None
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """Interface -> its first IPv4 address, of those that have one; empty where the system does not tell (only Linux
    does)."""
    names: dict[str, str] = {}
    if sys.platform != "linux":
        return names
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(query.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
                names[name] = socket.inet_ntoa(answer[20:24])
    return names


def interface_to(host: str, several: bool) -> str | None:
    """The interface that peers shall be told to reach this process at; None: leave it to the library.

    It is the one on the way to `host`, where the ranks meet. With `several` machines it is never the loopback (a
    machine's own name often leads there): the one with the default route then. Errors: `NetworkError`.
    """
    own = route_to(host)
    if several and ipaddress.ip_address(own).is_loopback:
        try:
            own = route_to(OUTSIDE)
        except NetworkError:
            return None
    return next((name for name, address in interfaces().items() if address == own), None)


def patiently(ask: Callable[[], str | None], limit_s: float) -> str | None:
    """The answer of `ask`, which may fail for so many seconds. Errors: `NetworkError`."""
    until = time.monotonic() + limit_s
    while True:
        try:
            return ask()
        except NetworkError:
            if time.monotonic() > until:
                raise
        time.sleep(0.5)


def address_on(interface: str) -> str:
    """The address of an interface. Errors: `NetworkError`, naming those there are."""
    known = interfaces()
    if interface not in known:
        listed = ", ".join(f"{name} ({address})" for name, address in known.items())
        raise NetworkError(
            "LS7023", f"{socket.gethostname()} has no interface {interface!r} with an address; it has {listed}"
        )
    return known[interface]


def holds(host: str, port: int) -> bool:
    """Whether this machine should open the port: the address is its own, and nobody listens there yet."""
    address = address_of(host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as caught:
            if caught.errno == errno.EACCES:
                raise NetworkError(
                    "LS7024", f"this user has no permission to open port {port}; use a port above 1023"
                ) from None
            return False
        return True


def end_silent(port: int, limit_s: float) -> None:
    """Connections of this process to that port, of any host, fail when their peer has been silent for so long. Else a
    read waits as long as the kernel's TCP does, which is a quarter of an hour. Does nothing but on Linux."""
    if sys.platform != "linux":
        return
    third = max(1, round(limit_s / 3))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
        # options belong to the connection, whatever number it has here
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as same:
            if same.family not in (socket.AF_INET, socket.AF_INET6) or same.getpeername()[1] != port:
                continue
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limit_s * 1000))


def reach(host: str, port: int, limit_s: float, say: Callable[[str], None]) -> None:
    """Wait until something listens there. `say` is told once when that takes a while. Errors: `NetworkError` after
    `limit_s` seconds, naming host, port, this machine's address on the way, and the reason."""
    own, began, noted = route_to(host), time.monotonic(), False
    while True:
        left = limit_s - (time.monotonic() - began)
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, left))):
                return
        except OSError as caught:
            reason = caught.strerror or str(caught)
        spent = time.monotonic() - began
        if spent >= limit_s:
            raise NetworkError(
                "LS7025",
                f"{host}:{port} is not reachable from {socket.gethostname()} ({own}) within {limit_s:g} s: {reason}",
            )
        if not noted and spent > 5:
            say(f"waiting for {host}:{port}: {reason}")
            noted = True
        time.sleep(min(0.5, max(0.0, limit_s - spent)))


def answers(host: str, port: int, limit_s: float) -> None:
    """Wait until a store of torch listens there and speaks. Something that accepts connections and says nothing would
    be waited for without an end. Errors: `NetworkError` after `limit_s` seconds."""
    until = time.monotonic() + limit_s
    reach(host, port, limit_s, say=lambda text: None)
    with socket.create_connection((host, port), timeout=max(1.0, until - time.monotonic())) as probe:
        try:
            # what torch's client begins with: VALIDATE with its magic number, PING with a number that comes back
            probe.sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 1))
            probe.recv(4)
        except TimeoutError:
            raise NetworkError(
                "LS7026",
                f"the program listening at {host}:{port} did not answer within {limit_s:g} s; it is stopped, or "
                "it is not a rendezvous of lockstep",
            ) from None
        except OSError:  # it closed: torch's own client says why
            return


SECRET_VARIABLE = "LOCKSTEP_SECRET"
SHORTEST = 16  # characters
_TAG = 64  # of a seal, in hexadecimal digits


class ForgedError(CodedError):
    """Something that bears no seal of this job: one message for the user."""


def secret_from_environment() -> str:
    """The job's secret, or "" where there is none. Errors: `RunError` for one that can be guessed."""
    value = os.environ.get(SECRET_VARIABLE, "").strip()
    if value and len(value) < SHORTEST:
        raise RunError(
            "LS7027",
            f"{SECRET_VARIABLE}: too short; expected at least {SHORTEST} characters, such as the output of "
            "`openssl rand -hex 32`",
        )
    return value


def secret_or_new() -> str:
    """The job's secret; a fresh one where none is given. For launchers that hand it to every rank themselves."""
    return secret_from_environment() or secrets.token_hex(32)


def seal(secret: str, name: str, content: bytes) -> bytes:
    """`content` under a seal that holds for this name only, so that nothing can be moved to another place."""
    return _tag(secret, name, content) + content


def unseal(secret: str, name: str, message: bytes) -> bytes:
    """The message that `sealed` was given. Errors: `ForgedError`."""
    if (why := secret_difference(secret, name, message)) is not None:
        raise ForgedError(
            "LS7028", f"{name!r} in the store is not signed by this job: {why}, or another program writes to the store"
        )
    return message[_TAG:]


def secret_difference(secret: str, name: str, message: bytes) -> str | None:
    """Why what `message` was sealed with is most likely not this secret; None where it is."""
    tag, content = message[:_TAG], message[_TAG:]
    if hmac.compare_digest(tag, _tag(secret, name, content)):
        return None
    if not secret:
        return f"another machine has a {SECRET_VARIABLE} and this one has none"
    if hmac.compare_digest(tag, _tag("", name, content)):
        return f"this machine has a {SECRET_VARIABLE} and another one has none"
    return f"{SECRET_VARIABLE} is not the same on every machine"


def _tag(secret: str, name: str, content: bytes) -> bytes:
    name_bytes = name.encode()
    return (
        hmac.new(secret.encode(), b"%d:%b:%b" % (len(name_bytes), name_bytes, content), hashlib.sha256)
        .hexdigest()
        .encode()
    )
