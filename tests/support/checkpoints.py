"""Hash of a checkpoint's content.

In: a checkpoint's folder. Out: a SHA-256 that is independent of the number of processes that wrote it.
"""

import hashlib
from pathlib import Path

import torch

from lockstep.checkpoint.manifest import Manifest, broken, read_manifest
from lockstep.checkpoint.shard_files import Files


def digest(folder: Path) -> str:
    """SHA-256 over a checkpoint's tensors by name, independent of their distribution over files. Errors: `ValueError`
    if it is damaged."""
    manifest = read_manifest(folder)
    fault = manifest if isinstance(manifest, str) else broken(folder, manifest)
    if fault is not None:
        raise ValueError(f"{folder}: {fault}")
    assert isinstance(manifest, Manifest)
    files, seen = Files(folder, manifest.hashes), hashlib.sha256()
    for name in files.names:
        seen.update(name.encode())
        seen.update(files.whole(name).reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
