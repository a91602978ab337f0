"""The exact exchange, flat and in stages, on two levels of links: hosts as network namespaces, with a limit on what
leaves each of them (`tc`) and a delay between them.

In: hosts, ranks of a host, the size of a gradient, rates in Mbit/s (0: no limit) and delays in ms. Out: a line of JSON
for each rate and delay: seconds of an exchange and of processor time of all ranks, medians of repeats that alternate,
and flat / stages. Where a delay is asked for, frames between hosts go through a process that holds them back
(`delayed_wire.py`), at a delay of 0 as well, so that settings compare. Needs root and what
`tests/support/hosts.py` needs. Example: python benchmarks/exchange_links.py --rates 0 100 --delays 0 5 20 --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist

from lockstep.strategies.exact.exchange import Exchange
from lockstep.strategies.exact.gradient_sum import layout_of
from lockstep.strategies.exact.reduce_schedule import LinkSpeeds

PORT = 29511


def once(kind: str, gradient: list[torch.Tensor], leaves: int, hosts: tuple[str, ...]) -> tuple[float, float, str]:
    """Measure seconds, CPU seconds of this rank, and a short hash of the sum."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    moving = Exchange(leaves, rank, ranks, links=LinkSpeeds(kind, hosts))
    for tensor in gradient:
        moving.submit({node: [tensor] for node in layout_of(leaves, ranks)[rank]})
    found = moving.finish()
    took = time.perf_counter() - began, time.process_time() - worked
    return *took, f"{sum(float(t.double().sum()) for (t,) in found)!r}"


def work(args: argparse.Namespace) -> None:
    """Run one rank: alternate exchanges for each setting found in the folder."""
    dist.init_process_group("gloo", init_method=f"tcp://{args.master}:{PORT}", rank=args.rank, world_size=args.ranks)
    torch.set_num_threads(1)
    hosts = tuple(f"host-{rank // args.a_host}" for rank in range(args.ranks))
    torch.manual_seed(args.rank)
    buckets = [torch.randn(args.bucket_kib * 256) for _ in range(args.mib * 1024 // args.bucket_kib)]
    place = Path(args.folder)
    for setting in range(args.settings):
        if args.rank == 0:
            while not (place / f"set-{setting}").exists():
                time.sleep(0.05)
        found: dict[str, list[list[float]]] = {"flat": [], "hierarchical": []}
        for turn in range(args.repeats + 1):
            for kind in ("flat", "hierarchical") if turn % 2 else ("hierarchical", "flat"):
                seconds, worked, bits = once(kind, buckets, args.ranks, hosts)
                every: list[tuple[float, float, str]] = [(0.0, 0.0, "")] * args.ranks
                dist.all_gather_object(every, (seconds, worked, bits))
                if turn:  # the first is a warm-up
                    found[kind].append([max(s for s, _, _ in every), sum(w for _, w, _ in every)])
                assert len({b for _, _, b in every}) == 1, "ranks have other sums"
        if args.rank == 0:
            (place / f"new-{setting}").write_text(json.dumps(found))
            (place / f"new-{setting}").rename(place / f"done-{setting}")
    dist.barrier()
    dist.destroy_process_group()


def shape(space: str, device: str, rate: float) -> None:
    """Limit the outgoing rate of a host."""
    from support import hosts

    words = ["tc", "-n", space, "qdisc", "replace", "dev", device, "root"]
    if not rate:
        hosts.run(*words, "pfifo_fast")
        return
    burst = max(16, int(rate * 1e6 / 8 / 250 / 1024))  # one frame, or the bytes of one tick at 250 Hz
    hosts.run(*words, "tbf", "rate", f"{rate}mbit", "burst", f"{burst}kb", "latency", "2s")


@contextmanager
def wire(net: Any, count: int, delayed: bool) -> Iterator[tuple[str, str, IO[str] | None]]:
    """Connect the hosts: returns a device, its address on the first host, and the pipe for delays."""
    if not delayed:
        yield "eth0", net.address(0), None
        return
    addresses = [net.address(host).replace("10.77.", "10.78.") for host in range(count)]
    ends = [f"{net.space(host)}={address}/24" for host, address in enumerate(addresses)]
    command = [sys.executable, str(Path(__file__).with_name("delayed_wire.py")), *ends]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as carrying:
        assert carrying.stdin is not None
        try:
            last = ["ip", "-n", net.space(count - 1), "addr", "show", "dev", "slow0"]
            while addresses[-1] not in subprocess.run(last, capture_output=True, text=True).stdout:
                assert carrying.poll() is None, "the wire is gone"
                time.sleep(0.1)
            yield "slow0", addresses[0], carrying.stdin
        finally:
            carrying.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--a-host", type=int, default=4)
    parser.add_argument("--mib", type=int, default=8, help="of the gradient")
    parser.add_argument("--bucket-kib", type=int, default=2048)
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 1000, 100])
    parser.add_argument("--delays", type=float, nargs="+", default=[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    for name in ("rank", "ranks", "settings"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    for name in ("master", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        work(args)
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Measure on hosts created for this run."""
    from support import hosts

    settings = [(rate, delay) for rate in args.rates for delay in args.delays]
    ranks = args.hosts * args.a_host
    common = [
        f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("a-host", "mib", "bucket-kib", "repeats")
    ]
    with (
        tempfile.TemporaryDirectory() as room,
        hosts.hosts(args.hosts, Path(room), Path(room)) as net,
        wire(net, args.hosts, any(args.delays)) as (device, master, delays),
    ):
        common += [f"--ranks={ranks}", f"--settings={len(settings)}", f"--master={master}", f"--folder={room}"]
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device, "PATH": os.environ["PATH"]}
        command = [sys.executable, str(Path(__file__).resolve()), *common]
        jobs = [net.start(rank // args.a_host, [*command, f"--rank={rank}"], **own) for rank in range(ranks)]
        for number, (rate, delay) in enumerate(settings):
            for host in range(args.hosts):
                shape(net.space(host), device, rate)
            if delays is not None:
                print(delay, file=delays, flush=True)
            (Path(room) / f"set-{number}").touch()
            while not (done := Path(room) / f"done-{number}").exists():
                time.sleep(0.1)
                for job in jobs:
                    assert job.process.poll() in (None, 0), job.err
            report(args, ranks, rate, delay, json.loads(done.read_text()))
        for job in jobs:
            assert job.ended(60) == 0, job.err


def report(
    args: argparse.Namespace, ranks: int, rate: float, delay: float, found: dict[str, list[list[float]]]
) -> None:
    line = {"hosts": args.hosts, "ranks": ranks, "mib": args.mib, "bucket_kib": args.bucket_kib, "mbit_s": rate}
    line |= {"delay_ms": delay, "repeats": args.repeats, "through": "a process" if any(args.delays) else "a bridge"}
    for kind, every in found.items():
        line[f"{kind}_s"] = round(median(seconds for seconds, _ in every), 4)
        line[f"{kind}_processor_s"] = round(median(worked for _, worked in every), 4)
    line["flat_to_tree"] = round(
        median(f[0] / t[0] for f, t in zip(found["flat"], found["hierarchical"], strict=True)), 2
    )
    line["processor"] = round(median(f[1] / t[1] for f, t in zip(found["flat"], found["hierarchical"], strict=True)), 2)
    line["pairs"] = [
        [round(f[0], 3), round(t[0], 3)] for f, t in zip(found["flat"], found["hierarchical"], strict=True)
    ]
    print(json.dumps(line), flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
