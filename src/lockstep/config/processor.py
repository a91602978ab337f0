"""The environment of `strategy.exact: portable`: every library takes the code that all x86-64 processors with AVX2
and FMA run alike, whatever else they can do. Libraries look at it once, when they are loaded, so it is set before.

In: whether a run asks for it. Out: variables of this process, which the ranks that it starts inherit. Imports nothing
heavy.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

# What each library is held to. ATen's own kernels have one variant for AVX2; oneDNN writes its code for the set of
# instructions that it is told, and is switched off besides; MKL's branch that looks at no processor is its slowest, and
# no product is left to it; OpenBLAS, which numpy brings, has kernels and sizes of blocks by the name of a processor;
# numpy's own functions have variants for each set of instructions, those above AVX2 under other names before 2.4.
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

_before: dict[str, str | None] = {}  # what the variables were, while they are pinned


def pin(portable: bool) -> None:
    """Set the variables for a run that asks for it, and take back what was set for an earlier run of this process."""
    if portable and not _before:
        _before.update({name: os.environ.get(name) for name in VARIABLES})
        os.environ.update(VARIABLES)
    elif not portable and _before:
        for name, value in _before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _before.clear()


def unpinned() -> list[str]:
    """Variables of this process that do not say what they have to, as `NAME=value` that would."""
    return [f"{name}={value}" for name, value in VARIABLES.items() if os.environ.get(name) != value]


def missing_instructions() -> str | None:
    """Why this processor is none of those whose bits are the same, in words; None: it is one of them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"this machine's processor is of the kind {platform.machine()}, and not x86-64"
    flags = _flags_of_glibc()
    if flags is None:
        flags = _flags_of_linux()
    if flags is None:
        return None  # another system: what torch says of itself decides, once it is loaded
    lacking = [name.upper() for name in INSTRUCTIONS if name not in flags]
    return f"this machine's processor has no {' and no '.join(lacking)}" if lacking else None


def refuse() -> None:
    """Errors: `RunError` where the ranks of this machine could not compute portably. Before numpy and torch are loaded,
    which may not even start on such a processor."""
    from lockstep.config.errors import RunError

    if (lacking := missing_instructions()) is not None:
        raise RunError("LS1142", f"strategy.exact: portable: {lacking}; set strategy.exact=true")


class _Leaf(ctypes.Structure):
    """`struct cpuid_feature` of glibc's <sys/platform/x86.h>: eax, ebx, ecx, edx as the processor has them, and those
    that the system lets programs use."""

    _fields_ = (("cpuid", ctypes.c_uint * 4), ("active", ctypes.c_uint * 4))


def _flags_of_glibc() -> set[str] | None:
    """The instructions of `INSTRUCTIONS` that programs may use, asked of the processor itself by glibc 2.33 or later;
    None: it cannot be asked."""
    try:
        leaf = ctypes.CDLL(None).__x86_get_cpuid_feature_leaf
    except (AttributeError, OSError, TypeError):
        return None
    leaf.restype, leaf.argtypes = ctypes.POINTER(_Leaf), [ctypes.c_uint]
    first, seventh = leaf(0).contents.active, leaf(1).contents.active  # CPUID 1 and 7
    return {name for name, there in {"fma": first[2] >> 12 & 1, "avx2": seventh[1] >> 5 & 1}.items() if there}


def _flags_of_linux() -> set[str] | None:
    """Those that /proc/cpuinfo lists; None: there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines = (line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags"))
    return set(next(lines, []))
