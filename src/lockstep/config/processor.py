"""The environment of `strategy.exact: portable`: limits libraries to AVX2 and FMA code, which gives the same bits on
all x86-64 processors that have both. Libraries read it once, when they are loaded, so it must be set before.

In: whether a run is portable. Out: environment variables of this process, which its ranks inherit. Imports nothing
heavy.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

# ATen has one kernel variant for AVX2. oneDNN generates code for the given instruction set, and is also disabled. MKL's
# processor-independent branch is its slowest; no matrix product uses MKL. OpenBLAS, bundled with numpy, selects kernels
# and block sizes by processor name. numpy has variants per instruction set, with other names above AVX2 before 2.4.
VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4,AVX512F,AVX512CD,AVX512_KNL,AVX512_KNM,AVX512_SKX,AVX512_CLX,AVX512_CNL,"
    "AVX512_ICL,AVX512_SPR",
}
INSTRUCTIONS = ("avx2", "fma")

replaced: dict[str, str | None] = {}  # previous values, while the variables are pinned


def pin(portable: bool, here: bool = False) -> None:
    """Set the variables for a portable run; otherwise restore those that an earlier portable run changed. `here`:
    whether this machine trains it. Errors: `RunError`, if its processor cannot."""
    if portable and here:
        refuse()
    if portable and not replaced:
        replaced.update({name: os.environ.get(name) for name in VARIABLES})
        os.environ.update(VARIABLES)
    elif not portable and replaced:
        for name, value in replaced.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        replaced.clear()


def unpinned() -> list[str]:
    """Return the variables of this process with a wrong value, as the required `NAME=value`."""
    return [f"{name}={value}" for name, value in VARIABLES.items() if os.environ.get(name) != value]


def missing_instructions() -> str | None:
    """Describe the missing instruction sets, or return None if this processor is supported."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"this machine's processor is {platform.machine()}, not x86-64"
    flags = _flags_of_glibc()
    if flags is None:
        flags = _flags_of_linux()
    if flags is None:
        return None  # another system: torch reports its capability once it is loaded
    lacking = [name.upper() for name in INSTRUCTIONS if name not in flags]
    return f"this machine's processor has no {' and no '.join(lacking)}" if lacking else None


def refuse() -> None:
    """Reject a portable run on an unsupported processor, where numpy and torch, loaded later, may not even start.
    Errors: `RunError`."""
    from lockstep.config.errors import RunError

    if (lacking := missing_instructions()) is not None:
        raise RunError("LS1142", f"strategy.exact: portable: {lacking}; set strategy.exact=true")


class _Leaf(ctypes.Structure):
    """`struct cpuid_feature` of glibc's <sys/platform/x86.h>: eax, ebx, ecx, edx as reported by the processor, and the
    bits that the system enables for programs."""

    _fields_ = (("cpuid", ctypes.c_uint * 4), ("active", ctypes.c_uint * 4))


def _flags_of_glibc() -> set[str] | None:
    """Return the usable sets of `INSTRUCTIONS`, by CPUID through glibc 2.33 or later; None if not available."""
    try:
        leaf = ctypes.CDLL(None).__x86_get_cpuid_feature_leaf
    except (AttributeError, OSError, TypeError):
        return None
    leaf.restype, leaf.argtypes = ctypes.POINTER(_Leaf), [ctypes.c_uint]
    first, seventh = leaf(0).contents.active, leaf(1).contents.active  # CPUID 1 and 7
    return {name for name, there in {"fma": first[2] >> 12 & 1, "avx2": seventh[1] >> 5 & 1}.items() if there}


def _flags_of_linux() -> set[str] | None:
    """Return the flags in /proc/cpuinfo, or None if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines = (line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags"))
    return set(next(lines, []))
