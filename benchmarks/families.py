"""Every family of models that transformers knows, tiny, under single, ddp and fsdp2: which train, and with whose bits.

In: heads and families to try (all by default), other strategies and a precision. Out: a line of JSON a family and head
in --out, which a later call goes on with, and a Markdown table with --table. Ranks are forked once a number of
processes and run family after family.
Example: python benchmarks/families.py --out families.jsonl; then the same with --table
python benchmarks/families.py --ways zero1:2 zero2:2 zero3:2 --precision bf16 --out zero.jsonl
python benchmarks/families.py --ways zero3:2 --recompute --out recomputed.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from lockstep.config.run import Run, RunError, load
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import resolve_strategy

TASKS: dict[str, dict[str, Any]] = {
    "classification": {"name": "classification"},
    "token_classification": {"name": "token_classification"},
    "causal": {"name": "language_modeling", "block_size": 16, "samples": 0},
    "masked": {"name": "masked_language_modeling", "samples": 0},
    "seq2seq": {"name": "translation", "source": "en", "target": "de", "samples": 0, "bleu": False},
}
WAYS = ["ddp:2", "ddp:3", "fsdp2:1", "fsdp2:2", "fsdp2:3"]  # strategy:processes
# Config entries under all their names, with small values.
SMALL: dict[int, str] = {
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads num_kv_heads num_encoder_attention_heads num_decoder_attention_heads num_experts_per_tok "
    "linear_num_key_heads linear_num_value_heads",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts",
    16: "head_dim d_kv d_head kv_channels qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank rotary_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state state_size",
    32: "hidden_size d_model n_embd dim emb_dim embedding_size moe_intermediate_size word_embed_proj_dim "
    "intermediate_size_mlp shared_expert_intermediate_size input_embedding_size true_hidden_size bottleneck_size",
    64: "intermediate_size n_inner d_ff d_inner ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim dff ffn_hidden_size",
    128: "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length max_target_positions",
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "llama_4_scaling_beta": 0.1}
ROPE |= {"original_max_position_embeddings": 128}
MLA = {"qk_rope_head_dim": 16, "head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SHARED = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
# Further requirements of single families.
ALSO: dict[str, dict[str, Any]] = {
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "n_head": 2},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "is_decoder": True},
    "mobilebert": {"intra_bottleneck_size": 32, "num_feedforward_networks": 1},
    "longformer": {"attention_window": 8},
    "convbert": {"head_ratio": 1, "conv_kernel_size": 3},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "axk1": MLA,
    "axk2": MLA | {"index_head_dim": 16, "index_n_heads": 2},
    "deepseek_v2": MLA | {"num_experts_per_tok": 2},
    "deepseek_v3": MLA,
    "deepseek_v32": MLA | {"index_head_dim": 16, "index_n_heads": 2},
    "minicpm3": MLA,
    "mistral4": MLA | {"rope_parameters": ROPE},
    "glm_moe_dsa": MLA | {"index_head_dim": 16, "index_n_heads": 2},
    "youtu": MLA,
    "hy_v4": MLA | {"index_head_dim": 16, "index_n_heads": 2},
    "longcat_flash": MLA
    | {"qk_head_dim": 32}
    | {"moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "num_layers": 1},
    "kimi_linear": MLA | {"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 2},
    "bailing_hybrid": MLA
    | {"num_expert_group": 1, "num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 2},
    "deberta": {"pooler_hidden_size": 32},
    "deberta-v2": {"pooler_hidden_size": 32},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "bamba": MAMBA,
    "granitemoehybrid": MAMBA,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "zamba": {"layers_block_type": SHARED, "attention_hidden_size": 64, "attention_head_dim": 32, "mamba_dt_rank": 4}
    | {"num_hidden_layers": 4},
    "zamba2": {"layers_block_type": SHARED, "attention_hidden_size": 64, "attention_head_dim": 32, "mamba_headdim": 8}
    | {"num_hidden_layers": 4, "num_query_groups": 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1, "num_key_value_heads": 1, "router_hidden_size": 16},
    "xlstm": {"embedding_dim": 32, "num_blocks": 2, "mode": "train", "chunk_size": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2}
    | {"num_self_attention_heads": 2, "num_cross_attention_heads": 2},
    "lilt": {"hidden_size": 48},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "visual_embed": False},
    "codegen": {"rotary_dim": 8, "n_head": 4, "n_embd": 64},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 128},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "esm": {"position_embedding_type": "absolute", "token_dropout": False, "vocab_size": 300},
    "gptj": {"rotary_dim": 8},
    "prophetnet": {"disable_ngram_loss": True},  # a term that lockstep does not compute
    "mimo_v2_flash": {"num_attention_heads": 4, "head_dim": 24},
    "blt": {"encoder_hash_byte_group_vocab": 64}
    | {"encoder_config": {"hidden_size_global": 32}, "decoder_config": {"hidden_size_global": 32}},
}


def families(head: str) -> list[str]:
    """Model types that transformers supports for a head."""
    from transformers.models.auto import modeling_auto

    from lockstep.tasks.models import heads

    return sorted(getattr(modeling_auto, heads.of(head).families))


def small(family: str) -> dict[str, Any]:
    """Entries of `model.config` that make a family tiny."""
    return sizes(transformers.CONFIG_MAPPING[family](), ALSO.get(family, {}))


def sizes(usual: Any, also: dict[str, Any]) -> dict[str, Any]:
    """Size entries of a config and its nested configs."""
    kind, known = type(usual), usual.to_dict()
    names = {name: size for size, names in SMALL.items() for name in names.split()}
    wanted = {n: s for n, s in names.items() if isinstance(known.get(n), int)}
    wanted |= {n: v for n, v in also.items() if n in known}
    for name in kind.sub_configs:
        if isinstance(part := getattr(usual, name, None), transformers.PreTrainedConfig):
            wanted[name] = sizes(part, also.get(name, {}))
    made = kind(**wanted).to_dict()
    lists = {n: v for n, v in made.items() if isinstance(v, list) and v != known.get(n)}  # one value per layer
    return wanted | lists


def write_data(folder: Path) -> None:
    """Write sentences that all tasks can read."""
    draw = random.Random(0)
    words = ["a", "the", "dog", "cat", "bird", "runs", "sees", "likes", "big", "small", "red", "old", "house"]
    for split, count in (("train", 36), ("validation", 7)):
        rows = []
        for _ in range(count):
            text = draw.choices(words, k=draw.randint(2, 10))
            tags = ["B-ANIMAL" if w in ("dog", "cat", "bird") else "O" for w in text]
            pair = {"en": " ".join(text), "de": " ".join(w[::-1] for w in text)}
            label = draw.choice(["yes", "no", "perhaps"])
            rows.append({"text": " ".join(text), "label": label, "tokens": text, "tags": tags, "translation": pair})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_of(
    head: str,
    family: str,
    folder: Path,
    strategy: str,
    precision: str = "fp32",
    exact: bool | str = True,
    threads: int = 1,
    recompute: bool = False,
) -> Run:
    """Build a run of two steps."""
    values = {
        "name": family,
        "task": TASKS[head],
        "data": {"source": str(folder), "max_length": 16},
        "model": {"type": family, "config": small(family), "checkpoint_activations": recompute},
        "tokenizer": {"train": "wordpiece" if head == "token_classification" else "bpe", "vocab_size": 120},
        "steps": 2,
        "batch_size": 9,
        "micro_batches": 3,
        "optim": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
        "strategy": {"name": strategy, "exact": exact},
        "precision": precision,
        "launch": {"device": "cpu", "threads": threads},
    }
    return load(None, [], values)


def trained(world: World, run: Run) -> dict[str, Any]:
    """Results of two steps and an evaluation, on rank 0 and on the others."""
    strategy = resolve_strategy(run, world.size)(Job.of(run, world.size), world)
    task = make_task(Job.of(run).with_data())
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    strategy.dry_run(feed.longest())
    results = [strategy.train_step(feed.make(step), 1e-3) for step in range(run.steps or 0)]
    scores = evaluate(world, task, strategy, task.splits["validation"])
    seen = hashlib.sha256()
    for name, tensor in sorted(strategy.state.state_dict().items()):
        seen.update(name.encode() + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    norms = [float(r.grad_norm) for r in results]
    strategy.close()
    return {"weights": seen.hexdigest(), "norms": norms, "scores": scores, "trains": norms[0] > 0}


def rank_main(rank: int, ranks: int, meet: str, run: Run, jobs: Any, results: Any) -> None:
    """Run one rank, job after job, until one fails: other ranks may then wait in a collective."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    world = World(run, meet)
    world.join()
    while (job := jobs.get()) is not None:
        try:
            results.put((rank, trained(world, job), None))
        except RunError as caught:
            results.put((rank, None, f"refused: {caught}"))
        except BaseException as caught:
            last = traceback.extract_tb(caught.__traceback__)[-1]
            said = " ".join(f"{type(caught).__name__}: {caught}".split())
            results.put((rank, None, f"fails: {said[:300]} ({Path(last.filename).name}:{last.lineno})"))


class Ranks:
    """Processes that are reused for many jobs, and replaced after a failure."""

    def __init__(self, count: int, run: Run) -> None:
        self.count, self.run = count, run
        self.processes: list[Any] = []

    def start(self) -> None:
        """Fork the processes; torch and transformers are already imported."""
        context = multiprocessing.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        self.jobs, self.results = [context.Queue() for _ in range(self.count)], context.Queue()
        meet = f"file://{self.folder.name}/meet"
        self.processes = [
            context.Process(target=rank_main, args=(r, self.count, meet, self.run, self.jobs[r], self.results))
            for r in range(self.count)
        ]
        for process in self.processes:
            process.start()

    def do(self, run: Run, timeout_s: float) -> dict[str, Any] | str:
        """Return rank 0's result, or the error."""
        if not self.processes:
            self.start()
        for jobs in self.jobs:
            jobs.put(run)
        found: dict[int, Any] = {}
        try:
            while len(found) < self.count:
                rank, value, error = self.results.get(timeout=timeout_s)
                if error is not None:
                    self.stop()
                    return error
                found[rank] = value
        except Exception:  # queue.Empty
            self.stop()
            return f"fails: no answer within {timeout_s:.0f} s"
        return found[0]

    def stop(self) -> None:
        """Terminate all processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []


def tried(
    head: str,
    family: str,
    folder: Path,
    ranks: dict[int, Ranks],
    timeout_s: float,
    ways: list[str],
    precision: str,
    recompute: bool = False,
) -> dict[str, Any]:
    """Try one family; returns one line of the table. `recompute`: ways other than single recompute activations."""
    line: dict[str, Any] = {"head": head, "family": family, "precision": precision}
    if recompute:
        line["recompute"] = True
    try:
        single = ranks[1].do(run_of(head, family, folder, "single", precision), timeout_s)
    except Exception as caught:
        return line | {"single": f"not tried: {type(caught).__name__}: {' '.join(str(caught).split())[:200]}"}
    if isinstance(single, str):
        return line | {"single": single}
    line["single"] = "trains" if single["trains"] else "no gradient"
    for way in ways:
        name, count = way.split(":")
        found = ranks[int(count)].do(run_of(head, family, folder, name, precision, recompute=recompute), timeout_s)
        line[way.replace(":", " ")] = found if isinstance(found, str) else "bits" if found == single else "other bits"
    return line


WHY = {
    "detectron2": "needs detectron2",
    "timm": "needs timm, for its images",
    "bbox": "needs boxes",
    "a config of several configs": "config of several configs, not tried",
    "AmbiguousGlobal": "layers that differ, whose entries could not be set",
    "DbrxAttentionConfig": "transformers 5.23 cannot build it",
    "'dropout'": "transformers 5.23 cannot build it",
    "validate_architecture": "its usual config is not valid",
    "bos_token_id": "needed a first token",
    **dict.fromkeys(("must match the size", "split_with_sizes", "empty() takes"), "sizes that did not fit each other"),
    **dict.fromkeys(("validate_layer_type", "`per_layer_config` keys"), "entries a layer that did not fit the layers"),
}


def why(said: str) -> str:
    """Shorten an error to a few words."""
    known = [words for part, words in WHY.items() if part in said]
    return known[0] if known else said.replace("|", "/")[:110].rsplit(" ", 1)[0]


def table(lines: list[dict[str, Any]]) -> str:
    """Format as Markdown: families with equal bits everywhere as one list per head, the others with a row each."""
    said = []
    ways = list(dict.fromkeys(key for x in lines for key in x if key.rpartition(" ")[2].isdigit()))
    for head in TASKS:
        ours = sorted((x for x in lines if x["head"] == head), key=lambda x: x["family"])
        if not ours:
            continue
        same = [x["family"] for x in ours if all(x.get(way) == "bits" for way in ways)]
        alone = [x["family"] for x in ours if x["single"] == "trains" and ways[0] not in x]
        others = [x for x in ours if x["single"] == "trains" and x["family"] not in same + alone]
        rest = [x for x in ours if x["single"] != "trains"]
        said.append(f"## {head}\n\nThe same bits in all of them ({len(same)} of {len(ours)}): {', '.join(same)}.\n")
        if alone:
            said.append(f"Trained by one process, not compared yet ({len(alone)}): {', '.join(alone)}.\n")
        if others:
            said.append(f"| family | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}")
            said += [
                f"| {x['family']} | " + " | ".join(x[way].replace("|", "/") for way in ways) + " |" for x in others
            ]
            said.append("")
        if rest:
            said.append("| not trained by one process either | families |\n|---|---|")
            reasons = sorted({why(x["single"]) for x in rest})
            for reason in reasons:
                said.append(f"| {reason} | {', '.join(x['family'] for x in rest if why(x['single']) == reason)} |")
            said.append("")
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="*", default=list(TASKS))
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--ways", nargs="*", default=WAYS, metavar="STRATEGY:PROCESSES", help="beside single")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="one for each file of --out")
    parser.add_argument("--recompute", action="store_true", help="model.checkpoint_activations, likewise")
    parser.add_argument("--out", type=Path, default=Path("families.jsonl"))
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one family under one strategy")
    parser.add_argument("--single", action="store_true", help="only whether one process trains")
    parser.add_argument("--table", action="store_true", help="only print what is in --out")
    options = parser.parse_args()
    known = [json.loads(x) for x in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(known))
        return
    if any(x.get("precision", "fp32") != options.precision for x in known):
        parser.error(f"{options.out} is of another --precision")
    if any(x.get("recompute", False) != options.recompute for x in known):
        parser.error(f"{options.out} is of runs with and without --recompute")
    done = {(x["head"], x["family"]) for x in known}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        folder.mkdir()
        write_data(folder)
        counts = {1, *(int(way.split(":")[1]) for way in options.ways)}
        ranks = {count: Ranks(count, run_of("causal", "gpt2", folder, "single")) for count in counts}
        for head in options.heads:
            for family in options.families or families(head):
                if (head, family) in done or family not in families(head):
                    continue
                ways = [] if options.single else options.ways
                line = tried(head, family, folder, ranks, options.timeout, ways, options.precision, options.recompute)
                print(" ".join(f"{k}={v}" for k, v in line.items()), flush=True)
                with options.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")
        for each in ranks.values():
            each.stop()


if __name__ == "__main__":
    main()
