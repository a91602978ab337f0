"""Read W&B's file of an offline run: a .wandb file of protobuf records in LevelDB's log format.

In: a file. Out: its records, in order. W&B's package no longer has a reader. A kill loses the last block's records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # bytes; a chunk's header: CRC-32, length, and whether a record begins or ends in it
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Yield `wandb.proto.wandb_internal_pb2.Record`s. Errors: `ValueError` for a file of another kind; protobuf's for a
    damaged record."""
    from wandb.proto import wandb_internal_pb2

    new: Any = wandb_internal_pb2
    data, place, parts = path.read_bytes(), HEADER, b""  # the file's own header is as long as a chunk's
    if data[:4] != b":W&B":
        raise ValueError(f"{path} is not a file of W&B")
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:  # no header fits: the block ends in zeros
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            record = new.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def last_step(files: Iterable[Path]) -> int:
    """Last step of the history in these files, as far as they can be read; 0 for none."""
    last = 0
    for path in files:
        with suppress(Exception):  # a torn record, or another version's format
            for record in records(path):
                if record.WhichOneof("record_type") == "history":
                    last = max(last, record.history.step.num)
    return last
