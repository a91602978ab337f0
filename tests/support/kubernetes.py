"""A job for Kubernetes."""

from __future__ import annotations

from support.harness import TINY

LAUNCH = {
    "name": "kubernetes",
    "image": "registry.example/lockstep:0.1.0",
    "pvc": "lockstep",
    "processes": 1,
    "machines": 2,
    "threads": 1,
    "wait": False,
}


RUN = TINY | {"name": "Tiny_run", "output": "out", "launch": LAUNCH}
