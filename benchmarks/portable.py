"""Do other processors give the same bits? Small models trained on this processor and on emulated ones, exports hashed.

In: emulated processors (`qemu-x86_64 -cpu help`; Debian's package qemu-user), families, precisions, steps, and
`strategy.exact`. Out: a table, and a line of JSON for each run in --out. `here+EPYC` is a job of two ranks, one each.
With `--operations` no model is trained: each operation is computed alone on all processors, and those whose bits differ
are listed. The emulation answers CPUID with the vendor, the instructions and the caches of the processor asked for,
which is what libraries choose their code by; it computes reciprocal estimates in its own way, as another vendor does.
With `--libraries` nothing is emulated: every family trains here while MKL and oneDNN are told to take other code, and
with two threads. Bits that change show a call that is left to one of them.
Example: python benchmarks/portable.py --cpus Haswell-noTSX EPYC --steps 1 20 --out portable.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = "here"  # this processor, without emulation
SIZES = {"max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "bert": {**SIZES, "intermediate_size": 96},
    "gpt2": {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama": {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2},
}
IMAGES: dict[str, dict[str, Any]] = {
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    | {"image_size": 32, "patch_size": 8},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
}


def rows(folder: Path) -> None:
    """Write texts of two classes with one to thirty words: many for training, few for evaluation."""
    draw = random.Random(5)
    words = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "el", "in", "ost", "ur")]
    lines = ["text,label"]
    for _ in range(260):
        text = [draw.choice(words) for _ in range(draw.randint(1, 30))]
        lines.append(f"{' '.join(text)},{'even' if len(text) % 2 == 0 else 'odd'}")
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    (folder / "validation.csv").write_text("\n".join(lines[:17]) + "\n")


def images(folder: Path) -> None:
    """Write folders of two labels: noise with a brighter part."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(3)
    for split, count in (("train", 24), ("validation", 6)):
        for number in range(count):
            label = ("left", "right")[number % 2]
            pixels = draw.integers(0, 120, (36, 40, 3))
            pixels[:, 20 * (number % 2) : 20 * (number % 2) + 20] += 100
            file = folder / split / label / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(file)


def emulated(cpu: str) -> list[str]:
    return [] if cpu == HERE else ["qemu-x86_64", "-cpu", cpu]


def write_run(folder: Path, cpu: str, family: str, precision: str, steps: int, exact: str) -> Path:
    """Write a run file in its own folder. `cpu`: of the only process, or of each rank, joined by +."""
    texts = family in FAMILIES
    data: dict[str, Any] = {name: str(folder / f"{name}.csv") for name in ("train", "validation")} | {"max_length": 40}
    home = folder / f"{cpu}-{family}-{precision}-{steps}-{exact}"
    run: dict[str, Any] = {
        "data": data if texts else {"source": str(folder / "images"), "layout": "class_folders"},
        "model": {"type": family, "config": FAMILIES[family] if texts else IMAGES[family]},
        "task": {"name": "classification", "samples": 0} if texts else {"name": "image_classification"},
        "precision": precision,
        "steps": steps,
        "batch_size": 16,
        "micro_batches": 2,
        "strategy": {"name": "ddp" if "+" in cpu else "single", "exact": exact},
        "verify": {"plain": False},
        "launch": {"device": "cpu", "timeout_s": 1800, "hang_timeout_s": 1800},
        "output": str(home / "out"),
    }
    if texts:
        run["tokenizer"] = {"train": "bpe", "vocab_size": 200}
    if family in ("convnext", "resnet"):
        run["task"]["processor"] = {"size": {"shortest_edge": 32}, "crop_pct": 1.0}
    home.mkdir()
    (home / "run.yaml").write_text(json.dumps(run))
    return home / "run.yaml"


TRAIN = """
import sys
from lockstep.cli import main
for file in sys.argv[1:]:
    main(["train", file])
"""


def train(cpu: str, files: list[Path]) -> list[str]:
    """Train runs in sequence, single-rank ones in one process; returns the hash of each export, or its failure."""
    processes, ranks = [], cpu.split("+")
    if len(ranks) > 1 and len(files) > 1:
        return [train(cpu, [file])[0] for file in files]
    for rank, each in enumerate(ranks):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if len(ranks) > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(len(ranks)), "LOCAL_RANK": str(rank)}
            environment |= {"LOCAL_WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29641"}
        command = [*emulated(each), sys.executable, "-c", TRAIN, *map(str, files)]
        with (files[0].parent / f"said-{rank}").open("w") as said:
            processes.append(subprocess.Popen(command, stdout=said, stderr=said, env=environment))
    for process in processes:
        process.wait()
    told = " ".join((files[0].parent / f"said-{rank}").read_text().strip()[-300:] for rank in range(len(ranks)))
    exports = [file.parent / "out" / "export" / "model.safetensors" for file in files]
    return [hashlib.sha256(e.read_bytes()).hexdigest()[:16] if e.is_file() else f"no export: {told}" for e in exports]


OPERATIONS = """
import hashlib, math, random, sys
import torch, torch.nn.functional as F
portable = sys.argv[1] == "portable"
if portable:
    from lockstep.distributed import portable
    portable.install(1)
torch.set_num_threads(int(sys.argv[2]) if not portable else 1)
draw, numbers = random.Random(1), torch.randn(2_000_000, generator=torch.Generator().manual_seed(0))
def say(name, *tensors):
    seen = hashlib.sha256()
    for t in tensors:
        seen.update(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    print(name, seen.hexdigest()[:16], sep="\\t")
for dtype in (torch.float32, torch.bfloat16):
    tag = str(dtype)[6:]
    outs, batched, leaves = [], [], []
    for i in range(150):
        m, n, k = (int(2 ** draw.uniform(0, 9)) for _ in range(3))
        a, b = numbers[i : i + m * k].view(m, k).to(dtype), numbers[3 * i : 3 * i + k * n].view(k, n).to(dtype)
        outs += [a @ b, a.T.contiguous().T @ b, F.linear(a, b.T.contiguous(), b[0])]
        batched.append(torch.bmm(a.expand(3, m, k), b.expand(3, k, n)))
    say(f"product {tag}", *outs)
    say(f"batched product {tag}", *batched)
    x = numbers[:60_000].view(200, 300).to(dtype)
    positive = x.abs() + 0.01
    for name in ("exp", "expm1", "sin", "cos", "tanh", "erf", "sigmoid", "rsqrt", "log", "log1p", "sqrt", "exp2"):
        say(f"{name} {tag}", getattr(torch, name)(positive if name in ("log", "log1p", "sqrt", "rsqrt") else x))
    say(f"pow {tag}", torch.pow(positive, 0.75), torch.pow(positive, 0.5), torch.pow(x, 3))
    for name, f in {"gelu": F.gelu, "gelu of tanh": lambda v: F.gelu(v, approximate="tanh"), "silu": F.silu,
                    "softmax": lambda v: F.softmax(v, -1), "log_softmax": lambda v: F.log_softmax(v, -1),
                    "layer_norm": lambda v: F.layer_norm(v, (300,)), "softplus": F.softplus,
                    "rms_norm": lambda v: F.rms_norm(v, (300,))}.items():
        leaf = x.clone().requires_grad_()
        out = f(leaf)
        (out * x).sum().backward()
        say(f"{name} {tag}", out)
        say(f"{name}, gradient {tag}", leaf.grad)
    say(f"sums {tag}", x.sum(), x.sum(0), x.sum(1), x.mean(), x.float().var(0))
    say(f"norm {tag}", torch.linalg.vector_norm(x))
    for causal in (False, True):
        heads = [numbers[j : j + 4 * 8 * 75 * 32].view(4, 8, 75, 32).to(dtype).requires_grad_() for j in (0, 7, 19)]
        out = F.scaled_dot_product_attention(*heads, is_causal=causal)
        (out * 0.5).sum().backward()
        say(f"attention{', causal' if causal else ''} {tag}", out, *(h.grad for h in heads))
    logits = x.clone().requires_grad_()
    loss = F.cross_entropy(logits, torch.arange(200))
    loss.backward()
    say(f"cross entropy {tag}", loss, logits.grad)
    table = numbers[:32_000].view(500, 64).to(dtype).requires_grad_()
    (F.embedding(torch.arange(3000) % 37, table) ** 2).sum().backward()
    say(f"embedding, gradient {tag}", table.grad)
    v = numbers.to(dtype)
    cut = lambda at, *shape: v[at : at + math.prod(shape)].view(shape)
    for name, (f, image, kernel, options) in {
        "convolution": (F.conv2d, cut(0, 4, 32, 14, 14), cut(9, 40, 32, 3, 3), {"padding": 1}),
        "convolution of 1 x 1": (F.conv2d, cut(0, 4, 64, 7, 7), cut(9, 40, 64, 1, 1), {"stride": 2}),
        "convolution of 7 x 7": (F.conv2d, cut(0, 2, 3, 64, 64), cut(9, 32, 3, 7, 7), {"stride": 2, "padding": 3}),
        "patches": (F.conv2d, cut(0, 4, 3, 32, 32), cut(9, 48, 3, 8, 8), {"stride": 8}),
        "convolution of each channel": (F.conv2d, cut(0, 2, 48, 14, 14), cut(9, 48, 1, 7, 7), {"groups": 48}),
        "dilated convolution": (F.conv2d, cut(0, 2, 8, 16, 16), cut(9, 8, 8, 3, 3), {"dilation": 2}),
        "transposed convolution": (F.conv_transpose2d, cut(0, 2, 8, 16, 16), cut(9, 8, 8, 3, 3), {"stride": 2}),
        "convolution of a line": (F.conv1d, cut(0, 2, 64, 90), cut(9, 64, 4, 16), {"padding": 8, "groups": 16}),
        "convolution of a volume": (F.conv3d, cut(0, 1, 8, 8, 12, 12), cut(9, 8, 8, 3, 3, 3), {"padding": 1}),
    }.items():
        leaves = [image.clone().requires_grad_(), kernel.clone().requires_grad_()]
        out = f(*leaves, cut(77, len(kernel)) if f is not F.conv_transpose2d else None, **options)
        (out * out).sum().backward()
        say(f"{name} {tag}", out, *(leaf.grad for leaf in leaves))
for dtype in (torch.float32, torch.float64):
    tag = str(dtype)[6:]
    x = numbers[:12_000].view(60, 200).to(dtype)
    small = x.abs() * 0.2 + 0.01
    for name in ("lgamma digamma sinh cosh atanh asinh logit i0 reciprocal erfinv tan log2 log10".split()):
        say(f"{name} {tag}", getattr(torch, name)(small))
    for name in ("cumsum", "cumprod", "logcumsumexp", "logsumexp"):
        say(f"{name} {tag}", getattr(torch, name)(x, -1))
    for name in "logsigmoid mish elu celu selu hardswish tanhshrink".split():
        leaf = x.clone().requires_grad_()
        out = getattr(F, name)(leaf)
        (out * x).sum().backward()
        say(f"{name} {tag}", out, leaf.grad)
    say(f"powers of tensors {tag}", torch.pow(x.abs(), x), torch.pow(10000.0, x))
    say(f"functions of two {tag}", *(getattr(torch, n)(x, x.flip(0)) for n in ("atan2", "hypot", "logaddexp")))
    say(f"distances {tag}", torch.cdist(x, x[:30]), torch.cdist(x[:5], x[:6]), torch.pdist(x))
    square = x[:9, :9]
    say(f"matrices {tag}", square.trace(), torch.linalg.matrix_power(square, 3), torch.matrix_exp(square * 0.1),
        torch.linalg.norm(x), torch.outer(x[0], x[1]), torch.inner(x, x), torch.tensordot(x, x, ([1], [1])))
    say(f"batch and group norm {tag}", F.batch_norm(x, None, None, training=True), F.group_norm(x, 10))
    say(f"enlarged {tag}", F.interpolate(x.view(1, 6, 10, 200), scale_factor=1.7, mode="bicubic"))
    for kind in (torch.nn.LSTM, torch.nn.GRU):
        torch.manual_seed(2)
        layer, leaf = kind(200, 32).to(dtype), x.view(6, 10, 200).clone().requires_grad_()
        out = layer(leaf)[0]
        out.sum().backward()
        say(f"{kind.__name__} {tag}", out, leaf.grad, layer.weight_ih_l0.grad)
    torch.manual_seed(2)
    with torch.no_grad():
        layer = torch.nn.TransformerEncoderLayer(200, 4, 64, batch_first=True, activation="gelu").to(dtype).eval()
        say(f"encoder layer, evaluated {tag}", layer(x.view(6, 10, 200)))
    lengths = torch.full((6,), 10), torch.full((6,), 3)
    say(f"losses {tag}", F.ctc_loss(x.view(10, 6, 200).log_softmax(-1), torch.ones(6, 3, dtype=torch.long), *lengths),
        F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="sum"),
        F.binary_cross_entropy(x.sigmoid(), x.flip(0).sigmoid()))
    torch.manual_seed(4)
    drawn = ("normal_", "exponential_", "log_normal_", "cauchy_", "bernoulli_", "uniform_")
    say(f"random numbers {tag}", *(getattr(torch.empty(3333, dtype=dtype), name)() for name in drawn),
        torch.nn.init.trunc_normal_(torch.empty(3333, dtype=dtype)), F.gumbel_softmax(x),
        torch.multinomial(x.softmax(-1), 5))
for name, options in {"fused AdamW": {"fused": True}, "AdamW": {"foreach": False}}.items():
    weight = numbers[:9000].clone().requires_grad_()
    weight.grad = numbers[100:9100] * 0.3
    optimizer = torch.optim.AdamW([weight], **options)
    for _ in range(5):
        optimizer.step()
    say(name, weight)
torch.manual_seed(3)
say("random numbers", torch.randn(4000), torch.rand(4000), F.dropout(torch.ones(4000), 0.1), torch.randperm(500))
"""


CONTROLS = {"instructions pinned": "AVX2,STRICT", "MKL compatible": "COMPATIBLE"}  # settings of MKL


def operations(cpu: str, variables: dict[str, str], portable: bool, threads: int) -> dict[str, str]:
    """Hash by operation."""
    command = [*emulated(cpu), sys.executable, "-c", OPERATIONS, "portable" if portable else "torch", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return dict(line.split("\t") for line in done.stdout.splitlines() if "\t" in line)


def compare_operations(cpus: list[str], exact: str, out: Path | None) -> None:
    """Print operations that differ between processors, or between one thread and two. Control: torch's own kernels with
    two settings of their libraries."""
    from lockstep.config.processor import VARIABLES

    avx2 = {name: VARIABLES[name] for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")}
    controls = {name: (avx2 | {"MKL_CBWR": value}, False) for name, value in CONTROLS.items()}
    settings = {"portable": (dict(VARIABLES), True)} if exact == "portable" else controls
    for name, (variables, portable) in settings.items():
        here = operations(HERE, variables, portable, 1)
        others = {cpu: operations(cpu, variables, portable, 1) for cpu in cpus}
        others["2 threads"] = operations(HERE, variables, portable, 2)
        for other, hashes in others.items():
            differ = sorted(key for key in here if hashes.get(key) != here[key])
            print(f"{name}; {other}: {len(differ)} of {len(here)} differ{': ' if differ else ''}{', '.join(differ)}")
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps({"setting": name, "other": other, "of": len(here), "differ": differ}) + "\n")


LIBRARIES = """
import json, os, sys, tempfile
from pathlib import Path
from lockstep.config import processor
processor.VARIABLES.update(json.loads(sys.argv[1]))
os.environ.update(processor.VARIABLES)
sys.path.insert(0, sys.argv[3])
import families, warnings
warnings.simplefilter("ignore")
world, threads, exact, head = None, int(sys.argv[2]), json.loads(sys.argv[4]), sys.argv[5]
with tempfile.TemporaryDirectory() as name:
    families.write_data(Path(name))
    for family in sys.argv[6:]:
        try:
            run = families.run_of(head, family, Path(name), "single", "fp32", exact, threads)
            world = world or families.World(run).join()
            print(family, families.trained(world, run)["weights"], sep="\\t", flush=True)
        except Exception as error:
            print(family, "no: " + " ".join(str(error).split())[:160], sep="\\t", flush=True)
"""


def compare_libraries(head: str, names: list[str], exact: bool | str, out: Path | None) -> bool:
    """Train tiny families with a head while MKL and oneDNN select other code, with two threads. Prints those whose bits
    change; returns whether any does."""
    told = []
    for variables, threads in (({}, 1), ({"MKL_CBWR": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "ALL"}, 2)):
        words = [json.dumps(variables), str(threads), str(Path(__file__).parent), json.dumps(exact), head, *names]
        done = subprocess.run([sys.executable, "-c", LIBRARIES, *words], capture_output=True, text=True, check=True)
        told.append(dict(line.split("\t") for line in done.stdout.splitlines() if "\t" in line))
    lines = {}
    for name in names:
        first, other = (each.get(name, "no: nothing was said") for each in told)
        lines[name] = first if first.startswith("no") else "the same bits" if first == other else "other bits"
    if out is not None:
        with out.open("a") as file:
            file.writelines(
                json.dumps({"family": name, "head": head, "exact": exact, "libraries": line}) + "\n"
                for name, line in lines.items()
            )
    for said in ("the same bits", "other bits"):
        print(f"{head}, {said}: {', '.join(name for name in names if lines[name] == said)}")
    print(*(f"{name}: {line}" for name, line in lines.items() if line.startswith("no")), sep="\n")
    return "other bits" in lines.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", nargs="+", default=["Haswell-noTSX", "Skylake-Client", "EPYC"])
    parser.add_argument("--families", nargs="+", help="default: three of text")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 20])
    parser.add_argument("--exact", default="portable", help="strategy.exact; true as the control")
    parser.add_argument("--operations", action="store_true", help="operations alone")
    parser.add_argument("--libraries", action="store_true", help="families while MKL and oneDNN take other code")
    parser.add_argument("--heads", nargs="+", default=["classification"], help="tasks, with --libraries")
    parser.add_argument("--out", type=Path)
    known = parser.parse_args()
    if known.libraries:
        import families

        exact = known.exact if known.exact == "portable" else True
        of = {head: known.families or families.families(head) for head in known.heads}
        changed = [compare_libraries(head, names, exact, known.out) for head, names in of.items()]
        sys.exit(any(changed))
    known.families = known.families or list(FAMILIES)
    if known.operations:
        compare_operations(known.cpus, known.exact, known.out)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows(folder)
        if any(family in IMAGES for family in known.families):
            images(folder / "images")
        kinds = [(f, p, s) for s in known.steps for f in known.families for p in known.precisions]
        exports: dict[str, list[str]] = {}
        for cpu in (HERE, *known.cpus):
            exports[cpu] = train(cpu, [write_run(folder, cpu, *kind, known.exact) for kind in kinds])
    different = 0
    for number, (family, precision, steps) in enumerate(kinds):
        runs = {cpu: each[number] for cpu, each in exports.items()}
        same = len(set(runs.values())) == 1 and not runs[HERE].startswith("no")
        different += not same
        print(f"{family} {precision} {steps} steps: {'the same bits' if same else runs}", flush=True)
        if known.out is not None:
            entry = {"family": family, "precision": precision, "steps": steps, "exact": known.exact}
            with known.out.open("a") as file:
                file.write(json.dumps(entry | {"exports": runs}) + "\n")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
