"""Every key of the run file and what changing it changes: data of the site's page reference/run-file-keys.md
(docs/site.py) and of its test.

In: nothing. Out: `KEYS`, a key -> `Tried`, a pair of small runs that differ in the key and the expected differences, or
`Elsewhere`, the test file that tries it because it needs several processes, a network, a cluster or a GPU.
`PYTHONPATH=tests python -m support.key_table` prints the page.
"""

from __future__ import annotations

from dataclasses import dataclass

# effect -> its words on the page
EFFECTS = {
    "order": "which examples stand in which step and micro-batch",
    "inputs": "tokens and targets, compared where the order is the same",
    "weights": "the weights that are trained",
    "export": "the exported weights, of the same training",
    "scores": "scores of the same weights",
    "files": "names of files in OUTPUT, or which steps they tell of",
    "text": "what is written or said beside numbers",
    "job": "what a launcher starts",
    "refused": "whether the run is refused",
    "nothing": "time, memory, names or last digits alone",
}


# kinds of runs other than classification, by their names in tests/support/task_runs.py
OTHER_TASKS = ("packed", "documents", "prompts", "messages", "translation", "token_classification", "preference")
OTHER_TASKS += ("reward", "masked", "questions", "pairs")


@dataclass(frozen=True)
class Tried:
    """Two runs of `kind` (key_table_runs.py) with `beside`, one of them with `change`. `effects`: exactly what must
    differ between them. If weights differ, export and scores do, too."""

    change: str
    effects: str
    kind: str = "emotion"
    beside: tuple[str, ...] = ()
    quick: bool = False  # in `make test`


@dataclass(frozen=True)
class Elsewhere:
    effects: str
    test: str  # a file in tests/
    needs: str


BF16 = ("precision=bf16",)
LONG = ("optim.warmup_steps=0", "steps=6")
WSD = ("optim.schedule=wsd", "optim.decay_fraction=0.5")
EVERY = ("evaluate.every=1",)
SMALL_OF_ANY = (
    "model.config={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 32}"
)
LEARNED = ("steps=40", "optim.learning_rate=5e-3", "fingerprint.every=40")
LETTERS = ("tokenizer.train=wordpiece", "tokenizer.vocab_size=60")

KEYS: dict[str, Tried | Elsewhere] = {
    "name": Tried("name=another", "text"),
    "output": Tried("output=FOLDER/elsewhere", "nothing", beside=("output=FOLDER/here",)),
    "remote_dir": Elsewhere("files", "checkpoint/test_remote_sync.py", "an object store"),
    "seed": Tried("seed=1", "order weights", quick=True),
    "epochs": Tried("epochs=2", "order weights", beside=("steps=null", "epochs=1", "data.limit=44")),
    "steps": Tried("steps=2", "order weights"),
    "max_time": Elsewhere("files", "jobs/test_stop.py", "a run that lasts"),
    "on_nonfinite": Elsewhere("weights", "training/test_nonfinite.py", "a loss that is not finite"),
    "batch_size": Tried("batch_size=16", "order weights", quick=True),
    "micro_batches": Tried("micro_batches=2", "order weights"),
    "precision": Tried("precision=bf16", "weights"),
    "metrics": Tried("metrics=[test_run_file_keys.always_one]", "scores"),
    "export": Tried("export=best", "export scores", beside=(*EVERY, "checkpoint.best=-loss", "export=last", "steps=6")),
    # task: classification
    "task.name": Tried("task.name=reward", "refused"),
    "task.text": Tried("task.text=other", "order weights", "rows"),
    "task.text_pair": Tried("task.text_pair=other", "order weights", "rows"),
    "task.image": Elsewhere("inputs", "tasks/test_image_classification.py", "images"),
    "task.processor": Elsewhere("inputs weights", "tasks/test_image_classification.py", "images"),
    "task.label": Tried("task.label=lang", "inputs weights", "rows"),
    "task.label_names": Tried("task.label_names=[a, b, c]", "text", "rows", ("task.label=number",)),
    "task.multi_label": Tried("task.multi_label=true", "refused", "rows", ("task.label=lists",)),
    "task.regression": Tried("task.regression=true", "inputs weights", "rows", ("task.label=number",)),
    "task.loss": Tried("task.loss=focal", "weights"),
    "task.focal_gamma": Tried("task.focal_gamma=1", "weights", beside=("task.loss=focal",)),
    "task.class_weights": Tried("task.class_weights=balanced", "weights"),
    "task.label_smoothing": Tried("task.label_smoothing=0.1", "weights"),
    "task.threshold": Tried("task.threshold=0.2", "scores", "rows", ("task.label=two",)),
    "task.samples": Tried("task.samples=1", "text"),
    # data
    "data.source": Tried("data.source=FOLDER/half", "order weights", "rows"),
    "data.sources": Elsewhere("order", "data/test_mixture.py", "several sources"),
    "data.config": Elsewhere("order", "data/test_hub_loading.py", "the Hub"),
    "data.revision": Elsewhere("order", "data/test_hub_loading.py", "the Hub"),
    "data.train": Tried(
        "data.train=FOLDER/half/train.jsonl",
        "order weights",
        "rows",
        ("data.validation=FOLDER/rows/validation.jsonl",),
    ),
    "data.validation": Tried("data.validation=FOLDER/half/train.jsonl", "scores", "rows"),
    "data.test": Tried("data.test=FOLDER/half/train.jsonl", "files scores", "rows"),
    "data.layout": Tried("data.layout=class_folders", "refused", "rows"),
    "data.columns": Tried("data.columns=[text, label]", "refused", "headless"),
    "data.separator": Tried("data.separator=semicolon", "refused", "table"),
    "data.quote": Tried("data.quote=none", "inputs weights", "table"),
    "data.types": Tried(
        "data.types={number: text}", "refused", "rows", ("task.label=number", "task.label_names=[a, b, c]")
    ),
    "data.validation_fraction": Tried("data.validation_fraction=0.3", "order weights", "cut"),
    "data.test_fraction": Tried("data.test_fraction=0.2", "order weights", "cut"),
    "data.split_column": Tried("data.split_column=split", "order weights", "cut"),
    "data.filter": Tried("data.filter={lang: en}", "order weights", "rows"),
    "data.deduplicate": Tried("data.deduplicate=true", "order weights", "rows"),
    "data.decontaminate": Tried("data.decontaminate=true", "order weights", "rows"),
    "data.drop_missing": Tried("data.drop_missing=true", "refused", "missing"),
    "data.drop_unusable": Tried("data.drop_unusable=true", "refused", "rows", ("data.validation=FOLDER/odd.jsonl",)),
    "data.follow_links": Tried("data.follow_links=true", "refused", "linked"),
    "data.encoding": Tried("data.encoding=latin-1", "refused", "latin"),
    "data.limit": Tried("data.limit=60", "order weights"),
    "data.max_length": Tried("data.max_length=8", "order weights"),
    "data.padding": Tried("data.padding=batch", "weights"),
    "data.group_by_length": Tried("data.group_by_length=3", "order weights"),
    "data.stream": Tried("data.stream=true", "order weights", "rows"),
    "data.stream_window": Tried("data.stream_window=30", "order weights", "rows", ("data.stream=true",)),
    "data.stream_cache_gb": Tried("data.stream_cache_gb=1", "nothing", "rows", ("data.stream=true",)),
    "data.workers": Elsewhere("nothing", "tasks/test_own_module_data.py", "a module of one's own"),
    # model
    "model.source": Elsewhere("weights", "tasks/test_pretrained.py", "a pretrained model"),
    "model.revision": Elsewhere("weights", "data/test_hub_loading.py", "the Hub"),
    "model.type": Tried("model.type=bert", "order weights", beside=(SMALL_OF_ANY,)),
    "model.config": Tried("model.config.n_layer=1", "weights", quick=True),
    "model.attention": Tried("model.attention=eager", "weights"),
    "model.compile": Elsewhere("weights", "strategies/test_compiled.py", "a C++ compiler"),
    "model.compile_lengths": Elsewhere("weights", "strategies/test_fixed_lengths.py", "model.compile=whole"),
    "model.cuda_graphs": Elsewhere("nothing", "strategies/test_cuda_graphs.py", "a GPU"),
    "model.checkpoint_activations": Tried("model.checkpoint_activations=true", "nothing"),
    "model.offload_activations": Elsewhere("nothing", "strategies/test_activations.py", "a GPU"),
    "model.adapter": Elsewhere("weights files", "tasks/test_adapters.py", "a pretrained model"),
    "model.dtype": Tried("model.dtype=bfloat16", "weights", beside=BF16),
    "model.freeze": Tried("model.freeze=['transformer.wte*']", "weights"),
    "model.quantization": Elsewhere("weights", "tasks/test_quantized.py", "bitsandbytes"),
    "model.trust_remote_code": Elsewhere("refused", "data/test_trusted_tokenizer.py", "code of others"),
    "tokenizer.source": Elsewhere("inputs weights", "lab/test_moving_loops.py", "a tokenizer"),
    "tokenizer.train": Tried("tokenizer.train=wordpiece", "order weights"),
    "tokenizer.vocab_size": Tried("tokenizer.vocab_size=150", "order weights"),
    # optim
    "optim.name": Tried("optim.name=lion", "weights", quick=True),
    "optim.learning_rate": Tried("optim.learning_rate=1e-3", "weights"),
    "optim.schedule": Tried("optim.schedule=cosine", "weights", beside=LONG),
    "optim.warmup_steps": Tried("optim.warmup_steps=1", "weights"),
    "optim.warmup_fraction": Tried("optim.warmup_fraction=0.5", "weights", beside=("optim.warmup_steps=0",)),
    "optim.min_lr_ratio": Tried("optim.min_lr_ratio=0.5", "weights"),
    "optim.power": Tried("optim.power=2", "weights", beside=("optim.schedule=polynomial", *LONG)),
    "optim.decay_fraction": Tried("optim.decay_fraction=0.9", "weights", beside=(*WSD, *LONG)),
    "optim.decay_steps": Tried("optim.decay_steps=2", "weights", beside=("optim.schedule=wsd", "optim.warmup_steps=0")),
    "optim.decay_shape": Tried("optim.decay_shape=sqrt", "weights", beside=(*WSD, "optim.warmup_steps=0", "steps=4")),
    "optim.weight_decay": Tried("optim.weight_decay=0.5", "weights"),
    "optim.groups": Tried("optim.groups=[{match: '*wte*', learning_rate: 1e-4}]", "weights"),
    "optim.layerwise_lr_decay": Tried("optim.layerwise_lr_decay=0.5", "weights"),
    "optim.master_weights": Tried("optim.master_weights=false", "weights", beside=("model.dtype=bfloat16", *BF16)),
    "optim.max_grad_norm": Tried("optim.max_grad_norm=null", "weights"),
    "optim.betas": Tried("optim.betas=[0.5, 0.9]", "weights"),
    "optim.eps": Tried("optim.eps=1e-3", "weights"),
    "optim.momentum": Tried("optim.momentum=0.5", "weights", beside=("optim.name=sgd",)),
    "optim.beta2_decay": Tried("optim.beta2_decay=-0.5", "weights", beside=("optim.name=adafactor",)),
    "optim.d": Tried("optim.d=3", "weights", beside=("optim.name=adafactor", "optim.learning_rate=0.1", *LONG)),
    "optim.min_8bit_size": Tried("optim.min_8bit_size=100000", "weights", beside=("optim.name=adamw_8bit",)),
    "optim.nesterov": Tried("optim.nesterov=false", "weights", beside=("optim.name=muon",)),
    "optim.ns_steps": Tried("optim.ns_steps=3", "weights", beside=("optim.name=muon",)),
    "optim.lr_adjust": Tried("optim.lr_adjust=original", "weights", beside=("optim.name=muon",)),
    "optim.muon_params": Tried("optim.muon_params=['*attn*']", "weights", beside=("optim.name=muon",)),
    "optim.average_power": Tried(
        "optim.average_power=0.5", "weights", beside=("optim.name=schedule_free", "optim.warmup_steps=3")
    ),
    # strategy and launch
    "strategy.name": Tried("strategy.name=ddp", "nothing"),
    "strategy.exact": Elsewhere("weights", "strategies/test_strategies.py", "several processes"),
    "strategy.all_reduce": Tried("strategy.all_reduce=hierarchical", "nothing"),
    "strategy.tensor_leaves": Tried("strategy.tensor_leaves=2", "weights"),
    "strategy.options": Elsewhere("weights", "strategies/test_fsdp2.py", "the engine of each strategy"),
    "launch.name": Elsewhere("job", "launchers/test_accelerate_config.py", "each launcher"),
    "launch.processes": Elsewhere("nothing", "strategies/test_strategies.py", "several processes"),
    "launch.device": Elsewhere("weights", "strategies/test_gpu.py", "a GPU"),
    "launch.processes_per_gpu": Elsewhere("nothing", "launchers/test_shared_gpus.py", "a GPU"),
    "launch.threads": Elsewhere("weights", "launchers/test_torchrun.py", "several threads"),
    "launch.max_restarts": Tried("launch.max_restarts=1", "nothing"),
    "launch.on_rank_failure": Elsewhere("nothing", "training/test_recovery.py", "several processes"),
    "launch.replicate_every": Elsewhere("nothing", "training/test_lost_shards.py", "several processes"),
    "launch.timeout_s": Tried("launch.timeout_s=99", "nothing"),
    "launch.hang_timeout_s": Tried("launch.hang_timeout_s=99", "nothing"),
    "launch.rebalance_every": Tried("launch.rebalance_every=2", "nothing"),
    # evaluate, checkpoint, guard, fingerprint, average
    "evaluate.every": Tried("evaluate.every=1", "files text"),
    "evaluate.patience": Tried(
        "evaluate.patience=1",
        "order weights files",
        beside=(*EVERY, "checkpoint.best=-loss", "export=last", "steps=6"),
    ),
    "evaluate.min_delta": Tried(
        "evaluate.min_delta=9", "order weights files", beside=(*EVERY, "evaluate.patience=1", "export=last")
    ),
    "evaluate.limit": Tried("evaluate.limit=5", "scores"),
    "evaluate.batch_size": Tried("evaluate.batch_size=3", "nothing"),
    "checkpoint.every": Tried("checkpoint.every=1", "files"),
    "checkpoint.keep": Tried("checkpoint.keep=1", "files", beside=("checkpoint.every=1",)),
    "checkpoint.at": Tried("checkpoint.at=[1]", "files"),
    "checkpoint.best": Tried(
        "checkpoint.best=macro_f1", "export files scores", beside=(*EVERY, "export=best", "steps=6")
    ),
    "checkpoint.on_failure": Elsewhere("refused", "checkpoint/test_checkpoint_faults.py", "a full disk"),
    "checkpoint.rescue": Elsewhere("files", "checkpoint/test_full_disk.py", "a full disk"),
    "checkpoint.changed_code": Elsewhere("refused", "config/test_user_code.py", "a resumed run"),
    "sdc_check.every": Tried("sdc_check.every=1", "nothing"),
    "sdc_check.on_difference": Elsewhere("files", "training/test_sdc_check.py", "a processor that is wrong"),
    "fingerprint.every": Tried("fingerprint.every=2", "files"),
    "average.ema": Tried("average.ema=0.5", "export scores"),
    "average.ema_warmup": Tried("average.ema_warmup=false", "export scores", beside=("average.ema=0.9",)),
    "average.last": Tried("average.last=2", "export files scores", beside=("checkpoint.every=1", "checkpoint.keep=1")),
    "verify.plain": Elsewhere("nothing", "plain/test_plain_check.py", "a run that is wrong"),
    # track, profile, hub
    "track.to": Elsewhere("files", "track/test_trackers.py", "trackers"),
    "track.every": Tried("track.every=3", "files"),
    "track.close_timeout_s": Tried("track.close_timeout_s=1", "nothing"),
    "track.console": Tried("track.console=quiet", "nothing"),
    "profile.steps": Tried("profile.steps=1", "files", beside=("profile.after=0",)),
    "profile.after": Tried("profile.after=1", "nothing", beside=("profile.steps=1", "profile.after=0")),
    "hub.push_to": Elsewhere("files", "checkpoint/test_hub.py", "the Hub"),
    "hub.private": Elsewhere("nothing", "checkpoint/test_hub.py", "the Hub"),
    "hub.license": Tried("hub.license=mit", "text"),
    "hub.language": Tried("hub.language=en", "text"),
    "hub.tags": Tried("hub.tags=[small]", "text"),
    # keys of the other tasks; a key of several tasks is tried on one
    "task.source": Elsewhere("inputs", "tasks/test_translation.py", "another language"),
    "task.target": Elsewhere("inputs", "tasks/test_translation.py", "another language"),
    "task.prefix": Tried("task.prefix='translate: '", "order weights", "translation"),
    "task.tokenizers": Tried("task.tokenizers=separate", "inputs weights", "translation"),
    "task.loss_chunk": Tried("task.loss_chunk=16", "weights", "documents"),
    "task.target_length": Tried("task.target_length=5", "order weights", "translation"),
    "task.beams": Tried("task.beams=4", "scores", "easy", LEARNED),
    "task.bleu": Tried("task.bleu=false", "scores", "translation"),
    "task.bleu_tokenizer": Tried("task.bleu_tokenizer=char", "scores", "easy", LEARNED),
    "task.rouge": Elsewhere("scores", "tasks/test_summarization.py", "a task of its own"),
    "task.document": Elsewhere("inputs", "tasks/test_language_modeling.py", "texts of several rows"),
    "task.prompt": Tried("task.prompt=answer", "order weights", "prompts"),
    "task.response": Tried("task.response=question", "order weights", "prompts"),
    "task.messages": Elsewhere("inputs", "tasks/test_conversations.py", "conversations"),
    "task.chat_template": Elsewhere("inputs", "tasks/test_conversations.py", "conversations"),
    "task.template_arguments": Elsewhere("inputs", "tasks/test_conversations.py", "conversations"),
    "task.tools": Elsewhere("inputs", "tasks/test_conversations.py", "conversations"),
    "task.turns": Tried("task.turns=per_turn", "order weights", "messages"),
    "task.block_size": Tried("task.block_size=20", "order weights", "packed"),
    "task.packing": Tried("task.packing=false", "order weights", "packed"),
    "task.attend_across_documents": Tried("task.attend_across_documents=false", "inputs weights", "packed"),
    "task.sample_prompt": Tried("task.sample_prompt='the dog'", "text", "packed"),
    "task.sample_tokens": Tried("task.sample_tokens=3", "text", "packed"),
    "task.temperature": Tried("task.temperature=0", "text", "packed"),
    "task.mlm_probability": Tried("task.mlm_probability=0.3", "inputs weights", "masked"),
    "task.whole_word_mask": Tried("task.whole_word_mask=true", "inputs weights", "masked", LETTERS),
    "task.model": Elsewhere("weights", "tasks/test_own_module.py", "code of one's own"),
    "task.data": Elsewhere("order", "tasks/test_own_module.py", "code of one's own"),
    "task.collate": Elsewhere("inputs", "tasks/test_own_module.py", "code of one's own"),
    "task.length": Elsewhere("order", "tasks/test_own_module_data.py", "code of one's own"),
    "task.targets": Elsewhere("weights", "tasks/test_own_module.py", "code of one's own"),
    "task.metrics": Elsewhere("scores", "tasks/test_own_module.py", "code of one's own"),
    "task.generate": Elsewhere("text", "tasks/test_own_module_strategies.py", "code of one's own"),
    "task.model_arguments": Elsewhere("weights", "lab/test_moving_loops.py", "code of one's own"),
    "task.data_arguments": Elsewhere("order", "tasks/test_own_module_data.py", "code of one's own"),
    "task.chosen": Tried("task.chosen=rejected", "order weights", "preference", ("task.rejected=prompt",)),
    "task.rejected": Tried("task.rejected=prompt", "order weights", "preference"),
    "task.conversations": Elsewhere("inputs", "tasks/test_preference.py", "conversations"),
    "task.beta": Tried("task.beta=0.5", "weights", "preference"),
    "task.gamma": Tried("task.gamma=2", "weights", "preference", ("task.loss=simpo",)),
    "task.reference_batch_size": Elsewhere("nothing", "tasks/test_preference.py", "batches of the reference"),
    "task.center": Tried("task.center=0.1", "weights", "reward"),
    "task.question": Tried("task.question=context", "order weights", "questions", ("data.max_length=64",)),
    "task.context": Elsewhere("inputs", "tasks/test_question_answering.py", "contexts with answers"),
    "task.answers": Elsewhere("inputs", "tasks/test_question_answering.py", "answers"),
    "task.unanswerable": Elsewhere("scores", "tasks/test_question_answering.py", "questions without an answer"),
    "task.stride": Tried("task.stride=2", "order weights", "questions", ("data.max_length=20",)),
    "task.answer_tokens": Tried("task.answer_tokens=1", "scores", "questions"),
    "task.words": Elsewhere("inputs", "tasks/test_token_classification.py", "another column"),
    "task.tags": Elsewhere("inputs", "tasks/test_token_classification.py", "another column"),
    "task.anchor": Tried("task.anchor=negative", "inputs weights", "pairs", ("task.negative=null",)),
    "task.positive": Tried("task.positive=negative", "inputs weights", "pairs", ("task.negative=null",)),
    "task.negative": Tried("task.negative=null", "inputs weights", "pairs"),
    "task.score": Elsewhere("weights", "tasks/test_embedding.py", "scored pairs"),
    "task.score_range": Elsewhere("weights", "tasks/test_embedding.py", "scored pairs"),
    "task.similarity_scale": Tried("task.similarity_scale=5", "weights", "pairs"),
    "task.negatives": Elsewhere("weights", "tasks/test_embedding.py", "a loss of its own"),
    "task.pooling": Tried("task.pooling=cls", "weights", "pairs"),
    "task.corpus": Elsewhere("scores", "tasks/test_embedding.py", "another set of texts"),
}

LAUNCHERS = {
    "launchers/test_torchrun.py": "machines rendezvous interface keep_alive_timeout_s",
    "launchers/test_hosts_refused.py": "join_timeout_s",
    "launchers/test_hosts.py": "node_rank last_call_timeout_s machine_rank init_method rank world_size",
    "launchers/test_accelerate_config.py": "config_file",
    "launchers/test_slurm.py": "ranks partition account qos constraint time signal_before gpus cpus memory requeue "
    "setup extra python",
    "clouds/test_kubernetes.py": "image pvc namespace kubeflow volumes environment secrets context wait",
    "clouds/test_kubernetes_pods.py": "stuck_minutes",
    "clouds/test_sagemaker.py": "role s3 region pytorch spot max_hours inputs",
    "clouds/test_sagemaker_plan.py": "instance",
    "clouds/test_moving_sagemaker.py": "wait_hours volume_gb",
    "clouds/test_ray_train.py": "address workers placement",
    "launchers/test_other_keys.py": "grace_s requirements detach",
}
for test, names in LAUNCHERS.items():
    KEYS |= {f"launch.{name}": Elsewhere("job", test, "a launcher") for name in names.split()}
TRACKERS = {
    "wandb": "project entity group name tags notes mode",
    "mlflow": "uri experiment name tags",
    "trackio": "project group name space private",
}
for tracker, names in TRACKERS.items():
    needs = f"the tracker {tracker}"
    KEYS |= {
        f"track.{tracker}.{name}": Elsewhere("job", "launchers/test_other_keys.py", needs) for name in names.split()
    }


def row(key: str, case: Tried | Elsewhere) -> str:
    """Format a line of the page."""
    changes = ", ".join(case.effects.split())
    if isinstance(case, Elsewhere):
        return f"| `{key}` | {changes} | | needs {case.needs}: `tests/{case.test}` |"
    words = " ".join(f"`{word}`" for word in case.beside if "FOLDER" not in word)
    task = f"task of `{case.kind}`; " if case.kind in OTHER_TASKS else ""
    beside = f"{task}{f'with {words}' if words else ''}".removesuffix("; ").replace("|", "\\|")
    change = case.change.replace("FOLDER/", "").replace("|", "\\|")
    return f"| `{key}` | {changes} | {beside} | `{change}` |"


def page() -> str:
    """Text of reference/run-file-keys.md."""
    words = "\n".join(f"- **{name}**: {text}" for name, text in EFFECTS.items())
    rows = "\n".join(row(key, KEYS[key]) for key in sorted(KEYS))
    return f"""# What each key changes

Two small runs that differ in one key must differ in what this table says, and in nothing else:
`tests/config/test_run_file_keys.py` tests it. The third column shows what was set beside the key, because some keys
have an effect only with others. If weights differ, exports, scores and texts differ as well. Keys that need several
processes, a network, a cluster or a GPU have tests of their own, which the last column names.

{words}

| key | changes | tried with | change or test |
|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    print(page())
