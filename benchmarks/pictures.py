"""The pictures of README, each as SVG for light and for dark pages.

In: `verify`: nothing; DeepSpeed 0.18.2 is installed beside the environment and `lockstep verify` runs with it (needs
the package registry, some minutes). `speed`: results/2026-11-23-peers-whole.json. Out: docs/images/verify.txt, what the
command printed, and docs/images/{verify,speed}-{light,dark}.svg.
Example: python benchmarks/pictures.py speed
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

import engine_versions

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs/images"
RESULTS = HERE / "results/2026-11-23-peers-whole.json"
VERSION = "0.18.2"
COMMAND = "lockstep verify strategy.name=zero2 strategy.exact=false launch.processes=2"
SHOWN = f"$ pip list | grep deepspeed\ndeepspeed  0.18.2\n$ {COMMAND}\n"
# background, text, dim, red, green, bars of lockstep and of the peer
THEMES = {
    "light": ("#ffffff", "#1f2328", "#59636e", "#cf222e", "#1a7f37", "#4051b5", "#b8bec8"),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", "#ff7b72", "#3fb950", "#8c9eff", "#4b535d"),
}
COLUMNS = 88  # width that stays readable beside a page's text
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"


def verified() -> str:
    """Output of `lockstep verify` for ZeRO-2 on a small quick start, with a faulty DeepSpeed version."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine_versions.install("deepspeed", VERSION, folder, False)
        (folder / "sitecustomize.py").write_text(engine_versions.BLIND)  # lockstep refuses this version by name
        path = os.pathsep.join([name, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "lockstep", "verify", *engine_versions.SMALL, "strategy.name=zero2"]
        command += ["strategy.exact=false"]  # let DeepSpeed reduce
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, cwd=name, capture_output=True, text=True)
    if run.returncode != 1:
        raise SystemExit(f"status {run.returncode} and not 1:\n{run.stdout}\n{run.stderr}")
    return "".join(f"{line.rstrip()}\n" for line in run.stdout.splitlines())


def terminal(text: str, theme: str) -> str:
    """Draw terminal lines as an SVG."""
    back, fore, dim, red, _, _, _ = THEMES[theme]
    lines = [part for line in (SHOWN + text).splitlines() for part in folded(line)]
    width, height = 9 * max(map(len, lines)) + 40, 20 * len(lines) + 32
    rows = []
    for place, line in enumerate(lines):
        wrong = "DIFFERENT" in line or line.startswith("  ")
        colour = red if wrong else dim if line.startswith(("expected", "dtypes", "training")) else fore
        weight = ' font-weight="bold"' if line.startswith("$") or "DIFFERENT" in line else ""
        rows.append(
            f'<text x="20" y="{34 + 20 * place}" fill="{colour}"{weight} xml:space="preserve">{escape(line)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="15" '
        f'role="img"><title>lockstep verify finds the wrong gradients of ZeRO-2 in DeepSpeed {VERSION}</title>'
        f'<rect width="{width}" height="{height}" rx="8" fill="{back}" stroke="{dim}" stroke-opacity="0.4"/>'
        f"{''.join(rows)}</svg>\n"
    )


def folded(line: str) -> list[str]:
    """Fold a line at `COLUMNS` as a terminal does, with two columns of indentation."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False)


def ratios() -> list[tuple[str, float, float]]:
    """Processes, precision, examples/s and peak memory of lockstep, relative to the best-tuned Trainer with unchanged
    batches."""
    runs = json.loads(RESULTS.read_text())["runs"]
    found = {(r["contender"], r["processes"], r["precision"]): r for r in runs}
    rows = []
    for processes in (1, 2):
        for precision in ("fp32", "bf16"):
            ours = found["lockstep", processes, precision]
            theirs = found["HF Trainer rebalanced", processes, precision]
            speed, memory = (ours[key] / theirs[key] for key in ("examples_per_s", "peak_memory_sum_bytes"))
            rows.append((f"{processes} process{'es' if processes > 1 else ''}, {precision}", speed, memory))
    return rows


def chart(theme: str) -> str:
    """Draw two groups of bars relative to the peer at 1."""
    back, fore, dim, _, _, ours, peer = THEMES[theme]
    left, bar, top, unit = 170, 18, 64, 190
    parts, rows = [], ratios()
    for group, (title, index) in enumerate((("examples a second", 1), ("peak memory", 2))):
        x0 = left + group * 330
        parts.append(f'<text x="{x0}" y="44" fill="{fore}" font-weight="bold">{title}</text>')
        for place, row in enumerate(rows):
            y, value = top + place * 34, row[index]
            if group == 0:
                parts.append(f'<text x="{left - 12}" y="{y + 14}" fill="{fore}" text-anchor="end">{row[0]}</text>')
            parts.append(f'<rect x="{x0}" y="{y}" width="{unit}" height="{bar}" fill="{peer}" opacity="0.45"/>')
            parts.append(f'<rect x="{x0}" y="{y + 4}" width="{unit * value:.1f}" height="{bar - 8}" fill="{ours}"/>')
            end = x0 + unit * max(value, 1) + 8
            parts.append(f'<text x="{end:.0f}" y="{y + 14}" fill="{fore}">{value:.2f}</text>')
        line = f'y1="{top - 8}" x2="{x0 + unit}" y2="{top + 34 * len(rows) - 8}"'
        parts.append(f'<line x1="{x0 + unit}" {line} stroke="{dim}" stroke-dasharray="3 3"/>')
    foot = top + 34 * len(rows) + 20
    parts.append(
        f'<text x="20" y="{foot}" fill="{dim}" font-size="12">1 = HF Trainer with its best settings that leave alone '
        "which examples meet (batch_rebalance). MiniLM, an epoch of 16,000 examples,</text>"
        f'<text x="20" y="{foot + 16}" fill="{dim}" font-size="12">one round; 2 cores of an AMD EPYC virtual machine, '
        "2026-11-23. Less memory is better.</text>"
    )
    parts.append(f'<text x="20" y="20" fill="{fore}" font-weight="bold">lockstep beside a tuned HF Trainer</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 {foot + 32}" font-family="system-ui,sans-serif" '
        f'font-size="14" role="img"><title>Speed and memory of lockstep beside HF Trainer</title>'
        f'<rect width="840" height="{foot + 32}" rx="8" fill="{back}"/>{"".join(parts)}</svg>\n'
    )


def shortened(text: str) -> str:
    """The part shown in README: up to the plain reference, without the middle rows."""
    lines = text.split("training the plain reference")[0].splitlines()
    return "\n".join(line.partition(": zero2 adds")[0] for line in lines if not line.startswith(("dtypes", "largest")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=("verify", "speed"))
    parser.add_argument("--recorded", action="store_true", help="draw what verify.txt holds, without a run")
    known = parser.parse_args()
    picture = known.picture
    if picture == "verify" and not known.recorded:
        (IMAGES / "verify.txt").write_text(verified())
    for theme in THEMES:
        svg = chart(theme) if picture == "speed" else terminal(shortened((IMAGES / "verify.txt").read_text()), theme)
        (IMAGES / f"{picture}-{theme}.svg").write_text(svg)


if __name__ == "__main__":
    main()
