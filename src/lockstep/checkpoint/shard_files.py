"""Write and read checkpoint tensors: divide them among ranks, write them in a thread, and hash the whole state.

In: the state that each rank holds. Out: safetensors files with hashes of their bytes; a hash of the whole state that
does not depend on how it is sharded; the mean of the weights of several checkpoints.

`torch.distributed.checkpoint` does the planning: it divides replicated tensors among the ranks, checks that everything
is covered once, and on loading locates the pieces that make up a rank's shard at any world size. Its default file
format contains a pickle, so lockstep uses the layout of its Hugging Face storage: safetensors whose header records
where each piece belongs, read by `HuggingFaceStorageReader`. Its writer is not used: it copies the content once more,
computes no hashes and does not sync. Writing needs no collective, so it can run in a thread during training.

`StateHash` adds the hashes of each tensor's parts (`lockstep_trace/tracer/fingerprint.py`) over ranks, in any order.
The final hash covers names, dtypes, shapes and these sums.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from lockstep.distributed.sharded import Saved, TensorSlice, WholeState
from lockstep.distributed.tensor_hashes import combined, hash_sum
from lockstep.distributed.torch_internals import local
from lockstep.distributed.world import World


class StateHash:
    """Hash one strategy's state repeatedly; the division of the work among ranks is computed once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: list[WriteItem] | None = None
        self._names: list[str] = []

    def of(self, parts: Mapping[str, Tensor]) -> dict[str, str]:
        """Hash the state. Returns `weights` and `optimizer`, each 16 hexadecimal digits. Names and shapes must be the
        same at every call. Collective; on a GPU, synchronizes with the device."""
        sums = self.sums(parts)
        return hashed(self._layouts, sums)

    def sums(self, parts: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the `hash_sum` of each whole tensor, by name. Same requirements as `of`. Collective."""
        if self._items is None:
            self._items = share_out(parts, self._world, True)
            layouts = self._world.all_gather({n: (str(t.dtype), tuple(t.shape)) for n, t in parts.items()})
            self._layouts = {name: layout for each in layouts for name, layout in each.items()}
            self._names = sorted(self._layouts)
        places = {name: place for place, name in enumerate(self._names)}
        sums = torch.zeros(len(self._names), dtype=torch.int64, device=self._world.device)
        with torch.no_grad():
            for item in self._items:
                assert item.tensor_data is not None
                name, chunk = item.index.fqn, item.tensor_data.chunk
                part = local(parts[name]).detach()
                sums[places[name]] += hash_sum(part, tuple(parts[name].shape), tuple(chunk.offsets))
        if self._world.size > 1:
            self._world.all_reduce(sums)
        return dict(zip(self._names, sums.tolist(), strict=True))


def hashed(layouts: Mapping[str, tuple[str, tuple[int, ...]]], sums: Mapping[str, int]) -> dict[str, str]:
    """Combine the hashes of tensors, and their dtypes and shapes (`layouts`), into the hashes of weights and optimizer
    state."""
    rows = [(name, *layouts[name], number) for name, number in sorted(sums.items())]
    weights = [row for row in rows if row[0].startswith("model.")]
    others = [row for row in rows if not row[0].startswith("model.")]
    return {"weights": combined(weights), "optimizer": combined(others)}


BLOCK_BYTES = 8 * 2**20  # hashed and written per block
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Written:
    """A file written to disk."""

    name: str
    sha256: str
    bytes: int


def share_out(parts: Mapping[str, Tensor], world: World, writes: bool) -> list[WriteItem]:
    """Divide the state among ranks for writing and return this rank's items. All ranks together write everything once;
    a rank with `writes` False writes nothing. Collective. Errors: `OSError`, on every rank, if some part is held only
    by ranks that do not write."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(parts), is_coordinator=world.is_main)
    plans, able = zip(*world.all_gather((planner.create_local_plan(), writes)), strict=True)
    covered = {item.index for plan, can in zip(plans, able, strict=True) if can for item in plan.items}
    for rank, (plan, can) in enumerate(zip(plans, able, strict=True)):
        if not can and any(item.index not in covered for item in plan.items):
            raise OSError(f"rank {rank} holds parts of the model and cannot see the folder of rank 0: share it")
    writing = [plan if can else replace(plan, items=[]) for plan, can in zip(plans, able, strict=True)]
    shared_out, _ = planner.create_global_plan(writing)  # deterministic: equal on every rank
    items = shared_out[world.rank].items
    return [item for item in items if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel()]


def held_here(parts: Mapping[str, Tensor]) -> dict[TensorSlice, Tensor]:
    """Every slice of the state that this rank holds, without copying. Not collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(parts), is_coordinator=True)
    items = [item for item in planner.create_local_plan().items if item.tensor_data is not None]
    slices = {place_of(item, parts): local(parts[item.index.fqn]) for item in items}
    return {place: tensor for place, tensor in slices.items() if tensor.numel()}


def place_of(item: WriteItem, parts: Mapping[str, Tensor]) -> TensorSlice:
    """Position of an item in its whole tensor."""
    assert item.tensor_data is not None
    chunk, tensor = item.tensor_data.chunk, parts[item.index.fqn]
    return TensorSlice(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), tuple(tensor.shape), tensor.dtype)


class Shard:
    """This rank's checkpoint file, with a reusable buffer and a layout computed once for all saves of a run.

    The buffer takes as many bytes as the rank writes, in host memory (pinned if there is a GPU).
    """

    def __init__(self, parts: Mapping[str, Tensor], world: World, writes: bool = True) -> None:
        """Compute the layout and allocate the buffer. Collective. Errors: `OSError`, as `share_out`."""
        self.name = f"shard-{world.rank + 1:05d}-of-{world.size:05d}.safetensors"
        items = share_out(parts, world, writes)
        items.sort(key=lambda item: (-parts[item.index.fqn].element_size(), item.index.fqn))  # for alignment
        header: dict[str, Any] = {}
        offsets, end = {}, 0
        for item in items:
            assert item.tensor_data is not None
            name, chunk, tensor = item.index.fqn, item.tensor_data.chunk, parts[item.index.fqn]
            start, end = end, end + chunk.sizes.numel() * tensor.element_size()
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(chunk.sizes), "data_offsets": [start, end]}
            offsets[name] = {"saved_offsets": list(chunk.offsets)}
        header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=world.device.type == "cuda")
        self._views = {}
        for item in items:
            entry, dtype = header[item.index.fqn], parts[item.index.fqn].dtype
            place = self._buffer[slice(*entry["data_offsets"])]
            self._views[item.index.fqn] = place.view(dtype).view(entry["shape"])
        self._cuda = world.device if world.device.type == "cuda" else None
        self._parts = _shapes(parts)

    @property
    def bytes(self) -> int:
        """Size of the file that this rank writes."""
        return len(self._header) + self._buffer.numel() if self._views else 0

    def suits(self, parts: Mapping[str, Tensor]) -> bool:
        """Return whether the layout still fits these parts (optimizer state may appear later for some weights)."""
        return _shapes(parts) == self._parts

    def fill(self, parts: Mapping[str, Tensor]) -> None:
        """Copy the state into the buffer; training may continue when this returns."""
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(local(parts[name]), non_blocking=True)
        if self._cuda is not None:
            torch.cuda.current_stream(self._cuda).synchronize()

    def write(self, folder: Path) -> Written | None:
        """Write and sync this rank's file, creating the folder. Returns None if this rank has nothing to write. Errors:
        `OSError`; no partial file remains."""
        if not self._views:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return write(folder / self.name, self._blocks())

    def _blocks(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        content = memoryview(self._buffer.numpy().data)
        for start in range(0, len(content), BLOCK_BYTES):
            yield content[start : start + BLOCK_BYTES]


def _shapes(parts: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.shape, local(tensor).shape, tensor.dtype) for name, tensor in parts.items()}


def write(path: Path, blocks: Iterable[memoryview | bytes]) -> Written:
    """Write a new file, sync it, and compute its hash at the same time. Releases the GIL while a block is hashed or
    written.

    Errors: `OSError`; no partial file remains.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "wb", buffering=0) as file:
            for block in blocks:
                digest.update(block)
                left = memoryview(block)
                size += len(left)
                while len(left):
                    left = left[file.write(left) or 0 :]
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Written(path.name, digest.hexdigest(), size)


class Background:
    """Run a function in a thread. It must not call collectives: threads of different ranks would call them in different
    orders."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="lockstep-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as caught:
            self.error = caught

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)


class Files(Saved):
    """A verified checkpoint on disk. Each rank reads the pieces that it needs, without communication."""

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        """`names`: the checkpoint's files; other files in the folder are ignored."""
        self._reader = _Reader(str(folder))
        self._reader.fs = _Named(names)
        self.names = sorted(self._reader.read_metadata().state_dict_metadata)

    def __contains__(self, name: str) -> bool:
        return name in self._reader.read_metadata().state_dict_metadata

    def read(self, targets: Mapping[str, Tensor]) -> None:
        metadata = self._reader.read_metadata()
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        there = {name: tensor for name, tensor in targets.items() if tensor.numel()}  # empty tensors are in no file
        planner.set_up_planner(there, metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        with torch.no_grad():  # as `torch.distributed.checkpoint.load` does with one process
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def whole(self, name: str) -> Tensor:
        """Read one whole tensor into host memory."""
        metadata: Any = self._reader.read_metadata().state_dict_metadata[name]
        tensor = torch.empty(metadata.size, dtype=metadata.properties.dtype)
        self.read({name: tensor})
        return tensor


class _Named(FileSystem):
    """A folder that lists only the given files."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [os.path.join(path, name) for name in sorted(self._names)]


class _Reader(HuggingFaceStorageReader):
    """Reader that reads the file headers only once."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


class FromMain(Saved):
    """A checkpoint that only rank 0 can read, because the folder is not shared between machines. Rank 0 broadcasts one
    whole tensor at a time."""

    def __init__(self, files: Files | None, world: World) -> None:
        """`files`: given on rank 0, None elsewhere. Collective."""
        self.world, self.files = world, files
        self.names: list[str] = world.broadcast(self.files.names if self.files else [])

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, targets: Mapping[str, Tensor]) -> None:
        for name in sorted({name for rank_names in self.world.all_gather(list(targets)) for name in rank_names}):
            tensor = self.files.whole(name) if self.files else None
            shape, dtype = self.world.broadcast((tensor.shape, tensor.dtype) if tensor is not None else None)
            on_device = torch.empty(shape, dtype=dtype) if tensor is None else tensor
            on_device = on_device.to(self.world.device)
            dist.broadcast(on_device, src=0)
            if name in targets:
                WholeState({name: on_device}).read({name: targets[name]})


class Mean(Saved):
    """Mean of the weights of several checkpoints; other state is the last one's. Weights equal in all of them keep
    their bits. Each element is rounded independently, so the result does not depend on how tensors are sharded."""

    def __init__(self, saved: Sequence[Saved]) -> None:
        self.saved = saved

    def __contains__(self, name: str) -> bool:
        return name in self.saved[-1]

    @torch.no_grad()
    def read(self, targets: Mapping[str, Tensor]) -> None:
        weights = {name: t for name, t in targets.items() if name.startswith("model.") and t.is_floating_point()}
        self.saved[0].read(weights)
        arriving = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        for number, each in enumerate(self.saved[1:], 2):
            each.read(arriving)
            for name, tensor in weights.items():
                mean, new = local(tensor).float(), local(arriving[name]).float()
                local(tensor).copy_(mean + (new - mean).div_(number))
        self.saved[-1].read({name: tensor for name, tensor in targets.items() if name not in weights})
