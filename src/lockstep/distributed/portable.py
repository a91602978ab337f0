"""Arithmetic that is equal on every x86-64 processor with AVX2 and FMA: `strategy.exact: portable`.

With the environment variables of `config/processor.py`, most of torch's CPU kernels run the same code everywhere. The
exceptions depend on the processor, its caches or its vendor: MKL's matrix products (kernels and blocking differ between
vendors, even in its AVX2 branch), MKL's elementary functions of float32 and float64 (`sqrt` starts from the processor's
estimate of the reciprocal root), and oneDNN. `install` replaces their kernels in this process: products by numpy's
OpenBLAS, with the kernels of one named processor and in pieces that do not depend on the number of threads;
convolutions by such products; `sqrt` by numpy, correctly rounded per IEEE 754; the other functions by float64 kernels
compiled into ATen (SLEEF). oneDNN is disabled. Operations without a portable form raise an error when called, in the
dry run at the latest.

In: the number of threads. Out: nothing; torch uses the new kernels from then on. Autograd, autocast, DDP and FSDP work
on top of these kernels, unchanged.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config import processor
from lockstep.config.run import RunError

ROWS = 256  # rows per piece of a product; pieces do not depend on the number of threads
MATRICES = 64  # matrices per piece of a batch of products
CORE = processor.VARIABLES["OPENBLAS_CORETYPE"]
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
# Operations of MKL, oneDNN or FBGEMM without a replacement here, with all variants of each name: LAPACK, transforms,
# other kinds of products, and functions that no known model trains with.
REFUSED = (
    *("asin", "acos", "atan", "erfc", "exponential", "addbmm", "_addmm_activation"),
    *("_embedding_bag", "_embedding_bag_forward_only", "_int_mm", "_scaled_mm"),
    *("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "to_mkldnn"),
    *("_fft_c2c", "_fft_r2c", "_fft_c2r", "geqrf", "ormqr", "linalg_qr", "linalg_householder_product", "linalg_lstsq"),
    *("_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_eigvals", "_linalg_eigvals", "_linalg_det"),
    *("_linalg_slogdet", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_inv_ex", "linalg_cholesky_ex"),
    *("cholesky", "cholesky_inverse", "_cholesky_solve_helper", "_linalg_solve_ex", "triangular_solve"),
    *("linalg_ldl_factor_ex", "linalg_ldl_solve"),
    FLASH,
)

_library: torch.library.Library | None = None  # keeps the kernels registered
_pool: ThreadPoolExecutor | None = None


def install(threads: int) -> None:
    """Install the portable kernels in this process, with `threads` threads for products. Errors: `RunError` if this
    processor is not supported, or a library was loaded before its variables were set."""
    global _library, _pool
    check()
    torch.set_num_threads(1)  # sums in torch's own kernels depend on the number of threads
    torch.backends.cuda.enable_flash_sdp(False)  # affects the CPU too, where it calls MKL
    torch.backends.mkldnn.set_flags(False)
    torch.backends.mha.set_fastpath_enabled(False)  # torch's encoder layers in evaluation: calls MKL
    _pool = ThreadPoolExecutor(threads, "lockstep-products") if threads > 1 else None
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # about overridden kernels
        warnings.simplefilter("ignore")
        for name, kernel in KERNELS.items():
            _library.impl(name, kernel, "CPU")
        for name, function in FUNCTIONS.items():
            _elementwise(_library, name, function)
        for name in (f"{name}{ending}" for name in REFUSED for ending in ("", "_")):
            if (operation := getattr(torch.ops.aten, name, None)) is not None:
                for overload in operation.overloads():
                    _library.impl(name if overload == "default" else f"{name}.{overload}", _refusal(name), "CPU")
        for key in ("SparseCPU", "SparseCsrCPU"):
            for name in ("mm", "bmm", "addmm", "addmm.out", "addmv.out"):
                _library.impl(name, _refusal(f"sparse {name}"), key)


def check() -> None:
    """Raise `RunError` if this process cannot compute portably."""
    able = torch.cpu.get_capabilities()
    lacking = None if able.get("avx2") and able.get("fma3") else "this processor lacks AVX2 or FMA"
    if (why := processor.missing_instructions() or lacking) is not None:
        raise RunError("LS7075", f"strategy.exact: portable: {why}; set strategy.exact=true")
    late = f"set them before Python starts: {' '.join(f'{k}={v}' for k, v in processor.VARIABLES.items())}"
    if left := processor.unpinned():
        raise RunError("LS7076", f"strategy.exact: portable: {', '.join(left)} is not set in this process; {late}")
    if (capability := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise RunError(
            "LS7077",
            f"strategy.exact: portable: torch was loaded before these variables were set, for {capability}; {late}",
        )
    if (core := _core_of_blas()) != CORE:
        raise RunError(
            "LS7078",
            f"strategy.exact: portable: numpy computes products with {core or 'another library'}, and not "
            f"with OpenBLAS for {CORE}; install numpy from PyPI, and {late}",
        )
    disabled = processor.VARIABLES["NPY_DISABLE_CPU_FEATURES"].split(",")
    if wider := set(disabled) & set(np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])):
        raise RunError(
            "LS7083",
            f"strategy.exact: portable: numpy was loaded before these variables were set, for "
            f"{', '.join(sorted(wider))}; {late}",
        )


def probe() -> str:
    """Return a hash of products, sums, functions, attention, convolutions and an update of fixed numbers, computed
    here. It is equal on all processors that `check` accepts, with the same torch and numpy. Takes some 30 ms."""
    numbers = (torch.arange(60_000, dtype=torch.int64) * 7919 % 10_007).to(torch.float32) / 5_000 - 1
    a, b = numbers[:38_400].view(100, 384), numbers[-38_400:].view(100, 384)
    results = [
        a @ b.T,
        a[:3] @ b[:5].T,
        a.T @ b,
        a.view(12, 25, 128) @ b.view(12, 128, 25),
        a[0] @ b[0],
        (a @ b.T).bfloat16(),
    ]
    results += [a.bfloat16() @ b.bfloat16().T, a.sum(), a.sum(0), a.mean(-1), torch.linalg.vector_norm(a)]
    results += [getattr(torch, name)(a.abs() * 0.9 + 0.01) for name in FUNCTIONS]
    results += [torch.from_numpy(f(a.double().numpy() + 2)) for f in (np.exp, np.log)]
    results += [a.softmax(-1), a.log_softmax(-1), a.sigmoid(), torch.expm1(a), torch.pow(a.abs(), 0.75), a.abs() ** 0.5]
    weight = a.clone().requires_grad_()
    functional = torch.nn.functional
    normed = functional.layer_norm(functional.gelu(weight) + functional.silu(weight), (384,))
    heads = normed.view(4, 25, 12, 32).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    functional.cross_entropy(attended.reshape(100, 384), torch.arange(100)).backward()
    assert weight.grad is not None
    results += [attended, weight.grad]
    torch.optim.AdamW([weight], fused=True).step()
    results.append(weight)
    filters = b[0, :216].reshape(8, 3, 3, 3).clone().requires_grad_()
    functional.conv2d(a[:32].reshape(2, 3, 32, 64), filters, padding=1).square().mean().backward()
    assert filters.grad is not None
    results.append(filters.grad)
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _core_of_blas() -> str | None:
    """Return the processor name of the kernels that numpy's OpenBLAS has loaded; None if numpy uses another library."""
    folders = [Path(np.__file__).parent.parent / "numpy.libs", Path(np.__file__).parent / ".libs"]
    for path in (path for folder in folders for path in sorted(folder.glob("*openblas*"))):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_get_corename64_", "scipy_openblas_get_corename", "openblas_get_corename64_"):
            if (function := getattr(library, name, None)) is not None:
                function.restype = ctypes.c_char_p
                return bytes(function()).decode()
    return None


# -- products --------------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, of shapes (m, k) and (k, n), or (batch, m, k) and (batch, k, n). Computed in float32 or float64;
    narrower dtypes in float32, rounded once."""
    return _wide_product(a, b).to(a.dtype)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 or float64."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    if not a.dtype.is_floating_point:
        raise RunError(
            "LS7079", f"strategy.exact: portable: a product of {a.dtype} has no portable form; set strategy.exact=true"
        )
    left, right = _array(a.detach().to(dtype)), _array(b.detach().to(dtype))
    out = np.empty((*left.shape[:-1], right.shape[-1]), left.dtype)
    piece = MATRICES if left.ndim == 3 else ROWS
    ranges = [slice(start, start + piece) for start in range(0, len(left), piece)]

    def compute(part: slice) -> None:
        np.matmul(left[part], right[part] if left.ndim == 3 else right, out=out[part])

    if _pool is None or len(ranges) < 2:
        for part in ranges:
            compute(part)
    else:
        list(_pool.map(compute, ranges))
    return torch.from_numpy(out)


def _array(x: Tensor) -> Any:
    """Return a view of a tensor as an array. `Tensor.numpy` would make its storage non-resizable, and FSDP frees the
    storage of gathered weights."""
    return np.from_dlpack(x.detach())


def _added(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta * bias + alpha * (a @ b), rounded to the dtype of `a` once."""
    result = _wide_product(a, b)
    if alpha != 1:
        result.mul_(alpha)
    if beta != 0:
        result.add_(bias.to(result.dtype), alpha=beta)
    return result.to(a.dtype)


def _times_vector(a: Tensor, x: Tensor) -> Tensor:
    return product(a, x.unsqueeze(1)).squeeze(1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return product(a.unsqueeze(0), b.unsqueeze(1)).reshape(())


def _added_vector(bias: Tensor, a: Tensor, x: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(bias.unsqueeze(-1), a, x.unsqueeze(1), beta, alpha).squeeze(1)


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Solve a @ x = b, or x @ a = b, for triangular `a`: row by row, one product each."""
    if not left:
        return _solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    size, batch = a.shape[-1], torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    whole = a.detach().expand(*batch, size, size).reshape(-1, size, size)
    x = b.detach().expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:]).clone()
    for row in reversed(range(size)) if upper else range(size):
        known = slice(row + 1, size) if upper else slice(0, row)
        x[:, row] -= product(whole[:, row : row + 1, known], x[:, known])[:, 0]
        if not unitriangular:
            x[:, row] /= whole[:, row, row].unsqueeze(-1)
    return x.reshape(*batch, *b.shape[-2:])


def _into(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the variant with `out=`."""

    def kernel(*operands: Any, out: Tensor, **options: float) -> Tensor:
        result = function(*operands, **options)
        return out.resize_(result.shape).copy_(result)

    return kernel


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the variant that writes into its first operand."""

    def kernel(first: Tensor, *operands: Any, **options: float) -> Tensor:
        return first.copy_(function(first, *operands, **options))

    return kernel


_ADDED = {"addmm": _added, "baddbmm": _added, "addmv": _added_vector}
_PLAIN = {"mm": product, "bmm": product, "mv": _times_vector, "dot": _dot}
KERNELS: dict[str, Callable[..., Any]] = _PLAIN | _ADDED
KERNELS |= {f"{name}.out": _into(function) for name, function in (_ADDED | {"mm": product, "bmm": product}).items()}
KERNELS |= {f"{name}_": _in_place(function) for name, function in _ADDED.items()}
KERNELS |= {"linalg_solve_triangular": _solve_triangular, "linalg_solve_triangular.out": _into(_solve_triangular)}


# -- convolutions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Geometry:
    """How a convolution kernel moves over an image; one number per dimension."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def places(self, size: Sequence[int]) -> list[int]:
        """Return the number of kernel positions on an image of this size, per dimension."""
        rows = zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(n + 2 * pad - gap * (k - 1) - 1) // step + 1 for n, k, step, pad, gap in rows]

    def padded(self, size: Sequence[int]) -> list[int]:
        return [n + 2 * pad for n, pad in zip(size, self.padding, strict=True)]

    def windows(self, image: Tensor) -> Tensor:
        """Return the windows of an image (C, *size) under the kernel: (groups, C / groups * kernel, places)."""
        whole = image.new_zeros(len(image), *self.padded(image.shape[1:]))
        self.inside(whole).copy_(image)
        places = self.places(image.shape[1:])
        gaps = [step * gap for step, gap in zip(whole.stride()[1:], self.dilation, strict=True)]
        window_strides = [step * each for step, each in zip(whole.stride()[1:], self.stride, strict=True)]
        windows = whole.as_strided((len(image), *self.kernel, *places), (whole.stride(0), *gaps, *window_strides))
        return windows.reshape(self.groups, len(image) // self.groups * math.prod(self.kernel), math.prod(places))

    def added(self, windows: Tensor, channels: int, size: Sequence[int]) -> Tensor:
        """Return the gradient of an image of this size from that of its windows, adding one kernel offset after
        another."""
        places = self.places(size)
        windows = windows.reshape(channels, *self.kernel, *places)
        whole = windows.new_zeros(channels, *self.padded(size))
        for offsets in itertools.product(*map(range, self.kernel)):
            rows = zip(offsets, self.dilation, self.stride, places, strict=True)
            spans = [slice(o * gap, o * gap + step * (count - 1) + 1, step) for o, gap, step, count in rows]
            into: list[Any] = [slice(None), *spans]
            place: list[Any] = [slice(None), *offsets]
            whole[tuple(into)] += windows[tuple(place)]
        return self.inside(whole)

    def inside(self, whole: Tensor) -> Tensor:
        """Return a view of a padded image without its padding."""
        for dim, pad in enumerate(self.padding, 1):
            whole = whole.narrow(dim, pad, whole.shape[dim] - 2 * pad)
        return whole


def _by_group(geometry: _Geometry, filters: Tensor) -> Tensor:
    """Reshape filters (out, in / groups, *kernel), or an image (out, *places), to (groups, out / groups, the rest)."""
    return filters.reshape(geometry.groups, len(filters) // geometry.groups, -1)


def _grouped_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for every group. A single group is one product, whose rows are divided among threads."""
    return product(a[0], b[0]).unsqueeze(0) if len(a) == 1 else product(a, b)


def _convolve(images: Tensor, filters: Tensor, geometry: _Geometry) -> Tensor:
    """Convolve images (N, in, *size) with filters (out, in / groups, *kernel): (N, out, *places), one image after
    another."""
    weight = _by_group(geometry, filters)
    out = images.new_empty(len(images), len(filters), *geometry.places(images.shape[2:]))
    for image, result in zip(images, out, strict=True):
        result.copy_(_grouped_product(weight, geometry.windows(image)).reshape(result.shape))
    return out


def _spread(gradients: Tensor, filters: Tensor, size: Sequence[int], geometry: _Geometry) -> Tensor:
    """Return the gradients of images (N, in, *size) from those of the outputs; also computes a transposed
    convolution."""
    weight = _by_group(geometry, filters).transpose(1, 2)
    channels = filters.shape[1] * geometry.groups
    out = gradients.new_empty(len(gradients), channels, *size)
    for gradient, result in zip(gradients, out, strict=True):
        windows = _grouped_product(weight, _by_group(geometry, gradient))
        result.copy_(geometry.added(windows, channels, size))
    return out


def _of_filters(gradients: Tensor, images: Tensor, shape: Sequence[int], geometry: _Geometry) -> Tensor:
    """Return the gradient of filters of this shape: a sum over images, first to last."""
    total = _by_group(geometry, gradients.new_zeros(*shape))
    for gradient, image in zip(gradients, images, strict=True):
        total += _grouped_product(_by_group(geometry, gradient), geometry.windows(image).transpose(1, 2))
    return total.reshape(shape)


def _geometry_of(filters: Tensor, moves: Sequence[Sequence[int]], groups: int) -> _Geometry:
    """Return the geometry of a convolution. `moves`: stride, padding, dilation, each with one number per dimension or
    one for all."""
    kernel = filters.shape[2:]
    stride, padding, dilation = (list(each) * len(kernel) if len(each) == 1 else list(each) for each in moves)
    return _Geometry(kernel, stride, padding, dilation, groups)


def _widened(*tensors: Tensor) -> list[Tensor]:
    """Convert to the dtype of the computation: float64 stays, narrower dtypes become float32."""
    if not tensors[0].dtype.is_floating_point:
        raise RunError(
            "LS7082",
            f"strategy.exact: portable: a convolution of {tensors[0].dtype} has no portable form; set exact=true",
        )
    return [each.detach().to(torch.float64 if each.dtype == torch.float64 else torch.float32) for each in tensors]


def convolution(
    images: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """torch's convolution in any number of dimensions, by products. Narrow dtypes are rounded once."""
    geometry = _geometry_of(filters, (stride, padding, dilation), groups)
    wide, weight = _widened(images, filters)
    if transposed:
        more = list(output_padding) * len(geometry.kernel) if len(output_padding) == 1 else output_padding
        rows = zip(images.shape[2:], geometry.kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True)
        size = [(n - 1) * step - 2 * pad + gap * (k - 1) + 1 for n, k, step, pad, gap in rows]
        out = _spread(wide, weight, [n + extra for n, extra in zip(size, more, strict=True)], geometry)
    else:
        out = _convolve(wide, weight, geometry)
    if bias is not None:
        out += bias.detach().to(out.dtype).reshape(-1, *[1] * len(geometry.kernel))
    return out.to(images.dtype)


def _convolution_backward(
    gradient: Tensor,
    images: Tensor,
    filters: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of images, filters and bias that `output_mask` selects."""
    geometry = _geometry_of(filters, (stride, padding, dilation), groups)
    wide, inputs, weight = _widened(gradient, images, filters)
    of_images = of_filters = of_bias = None
    if output_mask[0]:
        back = _convolve(wide, weight, geometry) if transposed else _spread(wide, weight, images.shape[2:], geometry)
        of_images = back.to(images.dtype)
    if output_mask[1]:
        pair = (inputs, wide) if transposed else (wide, inputs)
        of_filters = _of_filters(*pair, filters.shape, geometry).to(filters.dtype)
    if output_mask[2]:
        of_bias = wide.sum([0, *range(2, wide.dim())]).to(filters.dtype)
    return of_images, of_filters, of_bias


KERNELS |= {"convolution": convolution, "convolution_backward": _convolution_backward}


# -- functions of one number -----------------------------------------------------------------------------------------


def _sqrt(x: Tensor) -> Tensor:
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(_array(x), out=np.empty(x.shape)))


def _turned(x: Tensor) -> Tensor:
    """Return cos(x) + i sin(x)."""
    return torch.exp2(torch.complex(torch.zeros_like(x), x / math.log(2)))


def _tanh(x: Tensor) -> Tensor:
    grown = torch.expm1((2 * x).clamp(-80, 80))
    return grown / (grown + 2)


def _log(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa, exponent = torch.where(low, 2 * mantissa, mantissa), exponent - low.to(exponent.dtype)
    result = torch.log1p(mantissa - 1) + exponent.to(x.dtype) * math.log(2)
    special = torch.where(x == 0, -math.inf, torch.where(x < 0, math.nan, x))  # keeps inf and NaN
    return torch.where((x > 0) & (x < math.inf), result, special)


def _erf(x: Tensor) -> Tensor:
    """Compute erf from GELU, x (1 + erf(x / sqrt 2)) / 2, whose kernel has its own erf; near 0, where that cancels, by
    a series."""
    scaled = x * math.sqrt(2)
    far = 2 * torch.nn.functional.gelu(scaled) / scaled - 1
    square = x * x
    near = 2 / math.sqrt(math.pi) * x * (1 - square / 3 + square * square / 10 - square * square * square / 42)
    return torch.where(x.abs() < 1e-2, near, torch.where(x.abs() > 6, x.sign(), far))


def _erfinv(x: Tensor) -> Tensor:
    """Winitzki's approximation, refined by three steps of Halley's method."""
    tail = _log((1 - x) * (1 + x))
    middle = 2 / (math.pi * 0.147) + tail / 2
    guess = _sqrt((_sqrt(middle * middle - tail / 0.147) - middle).clamp_min(0)) * x.sign()
    for _ in range(3):
        error = (_erf(guess) - x) / (2 / math.sqrt(math.pi) * torch.exp2(-guess * guess / math.log(2)))
        guess = guess - error / (1 + guess * error)
    return torch.where(x.abs() < 1, guess, torch.where(x.abs() == 1, x * math.inf, math.nan))


def _power(x: Tensor, exponent: float) -> Tensor:
    """Raise x to a scalar power. torch's kernel uses MKL's square root for 0.5; the kernel for two tensors is SLEEF's
    and is called in float64 here."""
    if not x.is_floating_point():
        return torch.pow(x, torch.tensor(exponent))
    if (simple := _POWERS.get(exponent)) is not None:
        return simple(x)
    return torch.pow(x.double(), torch.tensor(exponent, dtype=torch.float64)).to(x.dtype)


_POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    1: torch.clone,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: torch.sqrt,
    -0.5: torch.rsqrt,
    -1: torch.reciprocal,
    -2: lambda x: (x * x).reciprocal(),
}
KERNELS |= {
    "pow.Tensor_Scalar": _power,
    "pow.Tensor_Scalar_out": _into(_power),
    "pow_.Scalar": _in_place(_power),
}


# Functions of float64 in terms of ATen's own kernels. float32 is computed in float64 and rounded.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": _sqrt,
    "exp": lambda x: torch.exp2(x * math.log2(math.e)),
    "log": _log,
    "log2": lambda x: _log(x) / math.log(2),
    "log10": lambda x: _log(x) / math.log(10),
    "sin": lambda x: _turned(x).imag,
    "cos": lambda x: _turned(x).real,
    "tan": lambda x: _turned(x).imag / _turned(x).real,
    "tanh": _tanh,
    "erf": _erf,
    "erfinv": _erfinv,
}


def _elementwise(library: torch.library.Library, name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Register a function of one tensor, with its in-place and `out=` variants."""

    def kernel(x: Tensor) -> Tensor:
        if x.is_complex():
            raise RunError(
                "LS7080",
                f"strategy.exact: portable: torch.{name} of complex numbers has no portable form; set exact=true",
            )
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return function(x.detach().to(torch.float64)).to(dtype)

    library.impl(name, kernel, "CPU")
    library.impl(f"{name}.out", _into(kernel), "CPU")
    library.impl(f"{name}_", _in_place(kernel), "CPU")


def unportable(name: str) -> RunError:
    """Return the error for an operation in `REFUSED`."""
    return RunError(
        "LS7081",
        f"strategy.exact: portable: torch's {name.strip('_')} is computed by a library that adapts to the "
        "processor; set strategy.exact=true",
    )


def _refusal(name: str) -> Callable[..., Any]:
    def kernel(*_operands: Any, **_options: Any) -> Sequence[Tensor]:
        raise unportable(name)

    return kernel
