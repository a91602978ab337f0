"""`strategy.exact: portable`: the same bits on every x86-64 processor with AVX2 and FMA, with any number of threads.

Judges: 80-bit functions of the C library for functions, sums of elementwise products for products, and processors that
QEMU emulates for bits. Kernels replace torch's for a whole process, so each test has processes of its own.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lockstep.config import processor
from lockstep.config.run import Run, load
from lockstep.data.job import Scope, arithmetic_of
from lockstep.distributed import portable
from lockstep.training.resolve import Machine, resolve
from support.command import start, start_anew, write
from support.harness import TINY
from support.messages import mentions, raises

PREPARED = """
import sys
from lockstep.config import processor
processor.pin(True)
import numpy as np, torch
from lockstep.distributed import portable
"""
INSTALLED = "portable.install(1)\n"
FORKED = """
import json, os, traceback
folder, jobs = sys.argv[1], json.loads(sys.argv[2])
for name, code in jobs.items():
    if (child := os.fork()) == 0:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}.{kind}", os.O_CREAT | os.O_WRONLY), number)
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
QEMU = shutil.which("qemu-x86_64")


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    yield
    processor.pin(False)


def python(code: str, *words: str, before: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def forked(folder: Path, jobs: dict[str, str], before: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the last line that each job prints. Each job runs in its own process, forked from one that has imported
    torch with portable's variables but without its kernels: that takes a second, or eight on an emulated processor."""
    done = python(PREPARED + FORKED, str(folder), json.dumps(jobs), before=before)
    assert done.returncode == 0, done.stderr
    printed = {name: (folder / f"{name}.out").read_text().splitlines() for name in jobs}
    assert all(printed.values()), [(folder / f"{name}.err").read_text() for name in jobs if not printed[name]]
    return {name: json.loads(lines[-1]) for name, lines in printed.items()}


def said(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def changed(**strategy: Any) -> Run:
    return load(None, {}, TINY | {"strategy": {"name": "single", "exact": "portable"} | strategy})


def features() -> list[str]:
    """The sets of instructions that numpy takes in this process."""
    found: Any = np.show_config(mode="dicts")
    return list(found["SIMD Extensions"].get("found", []))


# -- the environment -------------------------------------------------------------------------------------------------


def test_portable_variables_are_set_and_removed_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    run = changed()
    assert run.strategy.exact == "portable"
    assert processor.unpinned() == []
    changed(exact=True)
    assert os.environ["MKL_CBWR"] == "AVX2"
    assert "OPENBLAS_CORETYPE" not in os.environ


def test_portable_is_part_of_the_arithmetic() -> None:
    assert arithmetic_of(changed()) != arithmetic_of(changed(exact=True))
    assert arithmetic_of(changed()) == arithmetic_of(changed(name="ddp"))


@pytest.mark.slow
def test_operations_that_are_not_portable_are_refused_before_a_process_starts() -> None:
    run = load(None, {"strategy.name": "ddp", "strategy.exact": "portable", "model.compile": True}, TINY)
    with raises("LS5140", "model.compile"):
        resolve(run, Machine(), 2, Scope.OPTIONS)


def test_processors_without_the_instructions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor._flags_of_glibc() in (None, set(processor.INSTRUCTIONS) & (processor._flags_of_linux() or set()))
    with monkeypatch.context() as patch:  # where a process has gone on to load torch
        patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
        with raises("LS7075", "AVX2 or FMA"):
            portable.check()
    text = "model name : Intel Atom C3000 (Denverton)\nflags : fpu sse4_2 aes\n"
    monkeypatch.setattr(processor, "_flags_of_glibc", lambda: None)
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_named: text)
    assert "no AVX2 and no FMA" in (processor.missing_instructions() or "")
    with raises("LS7075", "no AVX2 and no FMA"):
        portable.check()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "aarch64" in (processor.missing_instructions() or "")


def test_a_run_is_read_on_any_processor_and_trained_on_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its export can be used everywhere."""
    monkeypatch.setattr(processor, "missing_instructions", lambda: "this machine's processor has no FMA")
    values = TINY | {"strategy": {"exact": "portable"}}
    assert load(None, {}, values).strategy.exact == "portable"
    assert load(None, {"launch.name": "slurm"}, values, trains=True).launch.name == "slurm"
    with raises("LS1142", "no FMA"):
        load(None, {}, values, trains=True)


@pytest.mark.processes
@pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (Debian's qemu-user)")
@pytest.mark.parametrize(
    "processor_",
    [*(pytest.param(each, marks=pytest.mark.long) for each in ("Denverton", "SandyBridge")), "Haswell,fma=off"],
)
def test_an_emulated_processor_is_refused(processor_: str, tmp_path: Path) -> None:
    """Processors without AVX2 or FMA are refused, even if importing numpy and torch ends in an illegal instruction."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TINY | {"strategy": {"exact": "portable"}}))
    words = [QEMU, "-cpu", processor_, sys.executable, "-m", "lockstep", "train", "run.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert mentions(done.stderr, "LS1142", "no FMA")


@pytest.mark.processes
def test_libraries_that_were_loaded_before_are_refused() -> None:
    clean = dict.fromkeys(processor.VARIABLES, "")
    late = "import torch, numpy; torch.ones(3).exp()\n" + PREPARED + INSTALLED
    done = python(late, **clean)
    assert done.returncode
    mentions(done.stderr, "LS7077", "ATEN_CPU_CAPABILITY=avx2")
    done = python("import torch\nfrom lockstep.distributed import portable\nportable.install(1)", **clean)
    assert done.returncode
    mentions(done.stderr, "LS7076", "OPENBLAS_CORETYPE=Haswell")
    code = "import numpy\n" + PREPARED + INSTALLED
    done = python(code, **processor.VARIABLES | {"OPENBLAS_CORETYPE": "Sandybridge"})
    assert done.returncode
    mentions(done.stderr, "LS7078", "Sandybridge", "OpenBLAS for Haswell")
    alone = {name: "" if name.startswith("NPY") else value for name, value in processor.VARIABLES.items()}
    done = python(code, **alone)
    wide = [each for each in processor.VARIABLES["NPY_DISABLE_CPU_FEATURES"].split(",") if each in features()]
    assert bool(done.returncode) == bool(wide)
    if wide:
        mentions(done.stderr, "LS7083", wide[0])


# -- the kernels -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all jobs for this processor. Libraries read their variables when they first compute."""
    folder, others = tmp_path_factory.mktemp("portable"), {"MKL_CBWR": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "ALL"}
    jobs = {"functions": INSTALLED + FUNCTIONS, "refused": INSTALLED + REFUSED}
    for name, threads in (("", 1), (" by 3 threads", 3)):
        jobs[f"products{name}"] = f"portable.install({threads})\n{PRODUCTS}"
        path = str(folder / f"convolutions{name}")
        jobs[f"convolutions{name}"] = f"portable.install({threads})\npath = {path!r}\n{CONVOLUTIONS}"
    for name, other in (("", {}), (" of others", others)):
        changed = f"processor.VARIABLES.update({other})\nos.environ.update({other})\n"
        jobs[f"probe{name}"] = changed + INSTALLED + PROBE
        jobs[f"bare{name}"] = changed + BARE
    return forked(folder, jobs)


ROOTS = """
torch.set_num_threads(1)
x = torch.randn(40_000, generator=torch.Generator().manual_seed(1))
product = x[:4000].view(8, 500) @ x[:1500].view(500, 3)
print(json.dumps([float(x.abs().sqrt().double().sum()), float(product.sum())]))
"""
PROBE = "print(json.dumps(portable.probe()))"
BARE = """
x = torch.arange(9000.0).view(30, 300).sin()
print(json.dumps(float((x @ x.T).double().sum() + (x * 0.3).exp().double().sum())))
"""
FUNCTIONS = """
import json, math
x = torch.randn(20_000, generator=torch.Generator().manual_seed(2)) * 4
judges = {n: getattr(np, n) for n in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "tanh")}
judges["erf"] = np.vectorize(math.erf)
worst = {}
for name, judge in judges.items():
    for dtype in (torch.float32, torch.bfloat16):
        v = (x.abs() + 1e-3 if name in ("sqrt", "log", "log2", "log10") else x).to(dtype)
        y = getattr(torch, name)(v)
        assert y.dtype == dtype
        assert torch.equal(y, getattr(v.clone(), name + "_")())
        assert torch.equal(y, getattr(torch, name)(v, out=torch.empty(3, dtype=dtype)))
        true = judge(v.double().numpy().astype(np.longdouble if name != "erf" else float))
        _, exponent = np.frexp(np.abs(true).astype(float))
        ulp = np.ldexp(1.0, exponent - (24 if dtype == torch.float32 else 8))
        worst[f"{name} {dtype}"] = float((np.abs(y.double().numpy() - true) / ulp).max())
u = (torch.rand(5000, generator=torch.Generator().manual_seed(3)) * 2 - 1) * 0.999
back = torch.from_numpy(judges["erf"](torch.erfinv(u.double()).numpy()))
worst["erfinv there and back"] = float((back - u).abs().max()) * 1e6
edges = torch.tensor([0.0, -1.0, float("inf"), float("nan")])
special = {n: getattr(torch, n)(edges).tolist() for n in ("sqrt", "log", "exp", "tanh", "erf")}
right = torch.autograd.gradcheck(torch.tanh, torch.randn(5).double().requires_grad_())
print(json.dumps({"worst": worst, "special": repr(special), "gradient": right}))
"""


@pytest.mark.processes
def test_portable_functions_are_rounded_correctly(answers: dict[str, Any]) -> None:
    told = answers["functions"]
    assert max(told["worst"].values()) < 0.501, told["worst"]
    assert told["special"] == repr(
        {
            "sqrt": [0.0, float("nan"), float("inf"), float("nan")],
            "log": [float("-inf"), float("nan"), float("inf"), float("nan")],
            "exp": [1.0, 0.3678794503211975, float("inf"), float("nan")],
            "tanh": [0.0, -0.7615941762924194, 1.0, float("nan")],
            "erf": [0.0, -0.8427007794380188, 1.0, float("nan")],
        }
    )
    assert told["gradient"]


PRODUCTS = """
import json
g = torch.Generator().manual_seed(1)
r = lambda *shape: torch.randn(*shape, generator=g)
slow = lambda a, b: (a.double().unsqueeze(-1) * b.double().unsqueeze(-3)).sum(-2)
a, b, c, v = r(700, 30), r(30, 9), r(700, 9), r(30)
p, q, s = r(150, 6, 30), r(150, 30, 5), r(150, 6, 5)
pairs = {
    "mm": (a @ b, slow(a, b)), "transposed": (b.T @ a.T, slow(a, b).T), "bmm": (p @ q, slow(p, q)),
    "mv": (a @ v, slow(a, v[:, None])[:, 0]), "dot": (v @ v, (v.double() * v.double()).sum()),
    "addmm": (torch.addmm(c, a, b, beta=0.5, alpha=2), 0.5 * c + 2 * slow(a, b)),
    "addmm_": (c.clone().addmm_(a, b), c + slow(a, b)),
    "beta of 0": (torch.addmm(c * float("nan"), a, b, beta=0), slow(a, b)),
    "addmv": (torch.addmv(a[:, 0], a, v), a[:, 0] + slow(a, v[:, None])[:, 0]),
    "baddbmm": (torch.baddbmm(s, p, q, alpha=3), s + 3 * slow(p, q)),
    "baddbmm_": (s.clone().baddbmm_(p, q), s + slow(p, q)),
    "out": (torch.mm(a, b, out=torch.empty(0)), slow(a, b)),
    "einsum": (torch.einsum("bij,bjk->bik", p, q), slow(p, q)),
    "linear": (torch.nn.functional.linear(p, q[0].T, s[0, 0]), slow(p, q[0].expand(150, 30, 5)) + s[0, 0]),
    "empty": (a[:0] @ b, slow(a[:0], b)), "expanded": (a[:1].expand(5, 30) @ b, slow(a[:1].expand(5, 30), b)),
}
far = lambda x, y: float((x.double() - y).abs().max()) if x.numel() else float(x.shape != y.shape)
errors = {name: far(*pair) for name, pair in pairs.items()}
half, exact = a.bfloat16() @ b.bfloat16(), slow(a.bfloat16(), b.bfloat16())
once = (c.bfloat16().double() + exact).bfloat16()
differ = torch.addmm(c.bfloat16(), a.bfloat16(), b.bfloat16()) != once
errors["bias of bfloat16, a hundredth may be the other neighbour"] = float(differ.double().mean()) * 3e-3
errors["bfloat16, in parts of its precision"] = far(half / (exact.abs() + 1), exact / (exact.abs() + 1)) / 2**8
try:
    torch.asin(v); refused = ""
except Exception as error:
    refused = str(error)
w = a.abs() + 0.1
for power in (0.5, 1, 2, 3, -0.5, -1, -2, 0.75, 4):
    true = torch.from_numpy(np.power(w.double().numpy(), power))
    for got in (w**power, w.clone().pow_(power), torch.pow(w, power, out=torch.empty(0))):
        errors[f"to the {power}"] = max(far(got / true, true / true), errors.get(f"to the {power}", 0.0))
for power in (0.1, -0.3):
    errors[f"float64 to the {power}"] = far(w.double() ** power, torch.from_numpy(np.power(w.double().numpy(), power)))
    short = w.bfloat16()
    true = torch.from_numpy(np.power(short.double().numpy(), power))
    errors[f"bfloat16 to the {power}"] = far(short**power / true, true / true) / 2**8
solve = torch.linalg.solve_triangular
for upper in (False, True):
    lower = r(4, 8, 8).double() / 9 + torch.eye(8)
    t, y = (lower.triu() if upper else lower.tril()), r(8, 3).double()
    ones = t - torch.diag_embed(t.diagonal(dim1=1, dim2=2)) + torch.eye(8)
    x, name = solve(t, y, upper=upper), f"triangular, {upper}"
    errors[name] = far(slow(t, x), y.expand(4, 8, 3))
    errors[f"{name}, on the right"] = far(slow(solve(t, y.T, upper=upper, left=False), t), y.T.expand(4, 3, 8))
    errors[f"{name}, ones"] = far(slow(ones, solve(t, y, upper=upper, unitriangular=True)), y.expand(4, 8, 3))
    errors[f"{name}, out"] = far(solve(t, y, upper=upper, out=torch.empty(0).double()), x)
    leaves = t.requires_grad_(), y.requires_grad_()
    assert torch.autograd.gradcheck(lambda t, y: solve(t, y, upper=upper), leaves)
errors["float64 alone"] = float(errors["float64 to the 0.1"] > 1e-14)
whole = torch.arange(5)
errors["whole numbers"] = float((whole**2).dtype != torch.int64 or (whole**2).tolist() != [0, 1, 4, 9, 16])
errors["whole numbers' roots"] = far(whole**0.5, torch.tensor([0, 1, 2**0.5, 3**0.5, 2]).double())
for held in (r(30, 9), r(30, 9).double()):  # as FSDP's gathered weights, whose memory is let go of and taken again
    a.to(held.dtype) @ held, held.abs().sqrt(), held.exp()
    held.untyped_storage().resize_(0)
print(json.dumps({"errors": errors, "refused": refused, "probe": portable.probe(), "types": str(half.dtype)}))
"""


@pytest.mark.processes
def test_products_are_products_and_the_number_of_threads_changes_no_bit(answers: dict[str, Any]) -> None:
    one, three = answers["products"], answers["products by 3 threads"]
    assert max(one["errors"].values()) < 3e-5, one["errors"]
    assert one == three
    assert one["types"] == "torch.bfloat16"
    mentions(one["refused"], "LS7081", "asin")


CONVOLUTIONS = """
import json
import torch.nn.functional as F
g = torch.Generator().manual_seed(1)
r = lambda *shape: torch.randn(*shape, generator=g)
cases = {
    "padded": (F.conv2d, r(4, 16, 14, 14), r(300, 16, 3, 3), {"padding": 1}),
    "with a step": (F.conv2d, r(2, 3, 31, 30), r(8, 3, 7, 7), {"stride": 2, "padding": 3}),
    "patches": (F.conv2d, r(2, 3, 32, 33), r(12, 3, 16, 16), {"stride": 16}),
    "of each channel": (F.conv2d, r(2, 12, 9, 9), r(24, 1, 7, 7), {"padding": 3, "groups": 12}),
    "groups of a line": (F.conv1d, r(2, 16, 40), r(32, 4, 6), {"padding": 3, "groups": 4}),
    "same size": (F.conv1d, r(2, 16, 40), r(32, 16, 5), {"padding": "same"}),
    "volume": (F.conv3d, r(1, 4, 8, 8, 8), r(6, 4, 3, 2, 3), {"padding": (1, 0, 1), "stride": (2, 1, 1)}),
    "dilated": (F.conv2d, r(1, 8, 16, 16), r(8, 8, 3, 3), {"dilation": 2, "stride": 2, "padding": 2}),
    "transposed": (F.conv_transpose2d, r(2, 8, 6, 7), r(8, 5, 3, 3), {"stride": 2, "output_padding": 1, "padding": 1}),
    "transposed groups": (F.conv_transpose1d, r(2, 8, 10), r(8, 3, 4), {"stride": 3, "groups": 2, "dilation": 2}),
    "one image": (F.conv2d, r(16, 9, 9), r(8, 16, 3, 3), {}),
    "no image": (F.conv2d, r(0, 16, 9, 9), r(8, 16, 3, 3), {}),
}
done = {}
for name, (f, x, w, options) in cases.items():
    channels = w.shape[1] * options.get("groups", 1) if "transposed" in name else len(w)
    bias = r(channels)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        leaves = [each.to(dtype).clone().requires_grad_() for each in (x, w, bias)]
        out = f(*leaves, **options)
        (out.double() ** 2).sum().backward()
        done[f"{name}, {dtype}"] = [out.detach(), *(leaf.grad for leaf in leaves)]
pair = r(1, 2, 5, 5).double().requires_grad_(), r(3, 2, 2, 2).double().requires_grad_()
assert torch.autograd.gradcheck(F.conv2d, pair)
assert torch.autograd.gradgradcheck(F.conv2d, pair)
torch.save(done, path)
print(json.dumps(path))
"""


@pytest.mark.processes
def test_convolutions_equal_those_of_torch_and_the_number_of_threads_changes_no_bit(
    answers: dict[str, Any], tmp_path: Path
) -> None:
    said(python(f"import torch\npath = {str(tmp_path / 'judge')!r}" + CONVOLUTIONS))
    paths = tmp_path / "judge", answers["convolutions"], answers["convolutions by 3 threads"]
    judge, one, three = map(torch.load, paths)
    assert judge.keys() == one.keys()
    for name, tensors in judge.items():
        limit = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}[tensors[0].dtype]
        for right, ours, again in zip(tensors, one[name], three[name], strict=True):
            assert (ours.dtype, ours.shape) == (right.dtype, right.shape), name
            assert torch.equal(ours, again), name
            assert not right.numel() or (ours - right).abs().max() <= limit * right.abs().max(), name


REFUSED = """
import json
square, answers = torch.eye(4) + 1, {}
calls = {"asin": lambda: torch.asin(square), "in place": lambda: torch.asin_(square.clone()),
         "drawn": lambda: torch.empty(4).exponential_(),
         "out": lambda: torch.asin(square, out=torch.empty(0)), "inverse": lambda: torch.linalg.inv(square),
         "determinant": lambda: torch.linalg.det(square), "transform": lambda: torch.fft.rfft(square),
         "sparse": lambda: torch.sparse.mm(square.to_sparse(), square), "rows": lambda: square.to_sparse_csr() @ square,
         "integers": lambda: torch.nn.functional.conv1d(torch.ones(1, 1, 4).long(), torch.ones(1, 1, 2).long()),
         "complex": lambda: torch.exp(torch.complex(square, square))}
for name, call in calls.items():
    try:
        answers[name] = repr(call())
    except Exception as error:
        answers[name] = str(error)
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
x = torch.randn(3, 5, 8)
with torch.no_grad():
    evaluated = layer(x)
print(json.dumps({"answers": answers, "evaluated": torch.equal(evaluated, layer.train()(x))}))
"""


@pytest.mark.processes
def test_operations_without_a_portable_form_are_refused_by_name(answers: dict[str, Any]) -> None:
    told = answers["refused"]
    codes = dict.fromkeys(told["answers"], "LS7081") | {"integers": "LS7082", "complex": "LS7080"}
    for name, answer in told["answers"].items():
        mentions(answer, codes[name])
    assert told["evaluated"]  # torch's own layers are evaluated by the kernels that they are trained by


@pytest.mark.processes
def test_nothing_is_left_to_libraries_that_look_at_the_processor(answers: dict[str, Any]) -> None:
    """MKL and oneDNN are told to take other code: this processor plays another one."""
    assert answers["probe"] == answers["probe of others"]
    assert answers["bare"] != answers["bare of others"]  # torch itself computes otherwise


# -- runs ------------------------------------------------------------------------------------------------------------


def trained(folder: Path, cache: Path, name: str, *words: str, exact: Any = "portable") -> tuple[str, str]:
    """The hash of the export of a short run, and what it printed."""
    path = write(folder / name, steps=3, strategy={"name": "ddp", "exact": exact}, evaluate={"every": 3})
    begin = start if exact is True else start_anew  # libraries look at portable's variables as they are loaded
    process = begin([sys.executable, "-m", "lockstep", "train", str(path), *words], path.parent, cache)
    told, errors = process.communicate(timeout=300)
    assert process.returncode == 0, told + errors
    weights = (path.parent / "out" / "export" / "model.safetensors").read_bytes()
    return hashlib.sha256(weights).hexdigest(), told


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bits_depend_neither_on_processes_nor_on_threads(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one, told = trained(tmp_path, cache, "one", "launch.processes=1")
    assert "compared" in told  # with plain transformers, before the first step
    two = ("launch.processes=2", "launch.threads=3", "strategy.name=fsdp2", "strategy.options={gather: micro_batch}")
    assert trained(tmp_path, cache, "two", *two)[0] == one
    assert trained(tmp_path, cache, "exact", "launch.processes=1", exact=True)[0] != one  # other kernels


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (Debian's qemu-user)")
def test_emulated_processors_compute_the_same(answers: dict[str, Any], tmp_path: Path) -> None:
    assert QEMU is not None
    bare = f"del os.environ['MKL_CBWR']\n{ROOTS}"
    for cpu, jobs in {"EPYC": {}, "Haswell-noTSX": {"roots": bare}}.items():
        (tmp_path / cpu).mkdir()
        found = forked(tmp_path / cpu, jobs | {"probe": INSTALLED + PROBE}, before=(QEMU, "-cpu", cpu))
        assert found["probe"] == answers["probe"]
    # Without the kernels the same processors differ: the emulation can tell.
    assert found["roots"] != forked(tmp_path, {"roots": bare})["roots"]
