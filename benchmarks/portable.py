"""Do other processors give the same bits? Small models trained on this processor and on emulated ones, exports hashed.

In: emulated processors (`qemu-x86_64 -cpu help`; Debian's package qemu-user), families, precisions, steps, and
`strategy.exact`. Out: a table, and a line of JSON for each run in --out. With `--operations` no model is trained: each
operation is computed alone on all processors, and those whose bits differ are listed. The emulation answers CPUID with
the vendor, the instructions and the caches of the processor asked for, which is what libraries choose their code by; it
computes reciprocal estimates in its own way, as another vendor does.
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

HERE = "here"  # this processor, without emulation
SIZES = {"max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "bert": {**SIZES, "intermediate_size": 96},
    "gpt2": {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama": {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2},
}


def rows(path: Path) -> None:
    """A few hundred texts of two classes, of one to thirty words."""
    draw = random.Random(5)
    words = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "el", "in", "ost", "ur")]
    lines = ["text,label"]
    for _ in range(260):
        text = [draw.choice(words) for _ in range(draw.randint(1, 30))]
        lines.append(f"{' '.join(text)},{'even' if len(text) % 2 == 0 else 'odd'}")
    path.write_text("\n".join(lines) + "\n")


def emulated(cpu: str) -> list[str]:
    return [] if cpu == HERE else ["qemu-x86_64", "-cpu", cpu]


def train(folder: Path, cpu: str, family: str, precision: str, steps: int, exact: str) -> str:
    """The hash of the export, or how the run ended."""
    run = {
        "data": {"train": str(folder / "rows.csv"), "validation": str(folder / "rows.csv"), "max_length": 40},
        "model": {"type": family, "config": FAMILIES[family]},
        "tokenizer": {"train": "bpe", "vocab_size": 200},
        "precision": precision,
        "steps": steps,
        "batch_size": 16,
        "micro_batches": 2,
        "strategy": {"name": "single", "exact": exact},
        "task": {"name": "classification", "samples": 0},
        "verify": {"plain": False},
        "output": str(folder / f"{cpu}-{family}-{precision}-{steps}-{exact}"),
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps(run))
    command = [*emulated(cpu), sys.executable, "-m", "lockstep", "train", str(file), "launch.device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    export = Path(str(run["output"])) / "export" / "model.safetensors"
    if done.returncode or not export.is_file():
        return f"status {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
    return hashlib.sha256(export.read_bytes()).hexdigest()[:16]


OPERATIONS = """
import hashlib, random, sys
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
    image = numbers[:4 * 3 * 32 * 32].view(4, 3, 32, 32).to(dtype)
    kernel = numbers[:8 * 3 * 16].view(8, 3, 4, 4).to(dtype)
    kernel.requires_grad_()
    out = F.conv2d(image, kernel, stride=4)
    (out * out).sum().backward()
    say(f"convolution {tag}", out, kernel.grad)
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


def operations(cpu: str, variables: dict[str, str], portable: bool, threads: int) -> dict[str, str]:
    """Hash by operation."""
    command = [*emulated(cpu), sys.executable, "-c", OPERATIONS, "portable" if portable else "torch", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return dict(line.split("\t") for line in done.stdout.splitlines() if "\t" in line)


def compare_operations(cpus: list[str], out: Path | None) -> None:
    """Print which operations differ between processors, and between one thread and two, in three settings."""
    from lockstep.config.processor import VARIABLES

    avx2 = {name: VARIABLES[name] for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")}
    settings = {
        "instructions pinned": (avx2 | {"MKL_CBWR": "AVX2,STRICT"}, False),
        "MKL compatible": (avx2 | {"MKL_CBWR": "COMPATIBLE"}, False),
        "portable": (VARIABLES, True),
    }
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", nargs="+", default=["Haswell-noTSX", "Skylake-Client", "EPYC"])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 20])
    parser.add_argument("--exact", default="portable", help="strategy.exact of the runs; true as the control")
    parser.add_argument("--operations", action="store_true", help="operations alone, in three settings")
    parser.add_argument("--out", type=Path)
    known = parser.parse_args()
    if known.operations:
        compare_operations(known.cpus, known.out)
        return
    different = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows(folder / "rows.csv")
        for family in known.families:
            for precision in known.precisions:
                for steps in known.steps:
                    runs = {
                        cpu: train(folder, cpu, family, precision, steps, known.exact) for cpu in (HERE, *known.cpus)
                    }
                    same = len(set(runs.values())) == 1 and not runs[HERE].startswith("status")
                    different += not same
                    print(f"{family} {precision} {steps} steps: {'the same bits' if same else runs}", flush=True)
                    if known.out is not None:
                        entry = {"family": family, "precision": precision, "steps": steps, "exact": known.exact}
                        with known.out.open("a") as file:
                            file.write(json.dumps(entry | {"exports": runs}) + "\n")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
