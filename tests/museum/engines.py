"""Training by Accelerate and by the Trainer of transformers, on a tiny model, with one fault of a list.

    python engines.py --engine NAME [--fault NAME] [--batch N]

`distilled` is the Trainer with the loss of TRL's GKDTrainer, between the model and a teacher. `resumed` skips the
batches of a second epoch that an earlier run has seen, with the sampler of Accelerate or (`--sampler swift`) of
ms-swift; `--epochs 2` goes on with a third epoch. `stream` reads an iterable data set of datasets in DDP. `litdata`
trains the rest of an epoch, which two ranks began, on one rank. `zero` is ZeRO 2 of DeepSpeed by Accelerate, and
`plain` the same loop without it. `checkpoint` goes on from what torch's distributed
checkpoints hold of another model and optimizer, as KempnerForge does. It imports torch, transformers, accelerate and,
where they are named, datasets, deepspeed, litdata, trl and a file of swift.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import types

import torch
from torch.utils.data import Dataset

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import patches

parser = argparse.ArgumentParser()
parser.add_argument("--engine", default="accelerate")
parser.add_argument("--model", default="bert")
parser.add_argument("--fault", default="")
parser.add_argument("--batch", type=int, default=8, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--smoothing", type=float, default=0.0, help="of labels, by the Trainer")
parser.add_argument("--sampler", default="accelerate", help="of `resumed`: accelerate or swift")
parser.add_argument("--epochs", type=int, default=1, help="of `resumed`, with the one that is resumed")
parser.add_argument("--set-epoch", action="store_true", help="`resumed` says the number of each epoch")
parser.add_argument("--patch", help="of patches.py")
parser.add_argument("--no-datasets", action="store_true", help="old versions fail to import a newer datasets")
a = parser.parse_args()
if a.no_datasets:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "datasets" else find(name, package)


class Texts(Dataset):
    """Rows of tokens of unequal length, padded, with a class each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(5, 60, (64, 10), generator=generator)
        self.lengths = torch.randint(3, 11, (64,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if a.model == "qwen3-moe":  # two batches after each other are the same: each rank gets the whole of one
            i = i // 8 * 4 + i % 4
        mask = (torch.arange(10) < self.lengths[i]).long()
        ids = self.ids[i] * mask
        labels = ids.masked_fill(mask == 0, -100) if a.model != "bert" else self.ids[i, 0] % 2
        if a.engine == "distilled" or a.smoothing:  # the first token is a prompt
            labels = labels.clone()
            labels[0] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model(seed: int = 0) -> torch.nn.Module:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(seed)
    if a.model == "qwen3-moe":
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # not in the old versions

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 32}
        routed = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "head_dim": 8}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, **sizes, **experts, **routed))
    if a.model == "llama":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    if a.model == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes, **dropout))


def by_trainer() -> None:
    from transformers import Trainer

    train_with(Trainer)


def train_with(trainer: type) -> None:
    from transformers import TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            per_device_train_batch_size=a.batch,
            gradient_accumulation_steps=a.accumulate,
            num_train_epochs=2,
            learning_rate=1e-3,
            label_smoothing_factor=a.smoothing,
            **({"train_sampling_strategy": "sequential"} if a.model == "qwen3-moe" else {}),
            report_to=[],
            save_strategy="no",
            eval_strategy="epoch",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        data = Texts()
        trainer(model=model(), args=options, train_dataset=data, eval_dataset=data).train()


def distilled() -> None:
    from transformers import Trainer
    from trl.experimental.gkd import GKDTrainer

    teacher = model(seed=1).eval()

    class Distilling(Trainer):
        """GKDTrainer's loss, without the texts that it generates."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            with torch.no_grad():
                told = teacher(**inputs).logits[:, :-1]
            loss = GKDTrainer.generalized_jsd_loss(
                outputs.logits[:, :-1], told, labels[:, 1:], num_items_in_batch=num_items_in_batch
            )
            return (loss, outputs) if return_outputs else loss

    train_with(Distilling)


def by_accelerate() -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=a.accumulate)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = DataLoader(Texts(), batch_size=a.batch, shuffle=True, generator=torch.Generator().manual_seed(9))
    test = DataLoader(Texts(), batch_size=24)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    if a.fault == "not-prepared":
        net, optimizer = accelerator.prepare(net, optimizer)
    else:
        net, optimizer, loader, test, schedule = accelerator.prepare(net, optimizer, loader, test, schedule)
    for _ in range(2):
        net.train()
        for batch in loader:
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                if a.fault == "divided-twice":
                    loss = loss / a.accumulate
                accelerator.backward(loss)
                if accelerator.sync_gradients or a.fault == "clip-always":
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                if a.fault != "never-zeroed":
                    optimizer.zero_grad()
        if a.fault != "no-eval":
            net.eval()
        with torch.no_grad():
            for batch in test:
                accelerator.gather_for_metrics(net(**batch).logits)
    accelerator.end_training()


def by_zero() -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    if a.engine == "plain":
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=a.accumulate)
    else:
        import deepspeed
        from accelerate import DeepSpeedPlugin

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # is compiled otherwise, for half a minute
        config = {
            "train_micro_batch_size_per_gpu": a.batch,
            "gradient_accumulation_steps": a.accumulate,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        accelerator = Accelerator(gradient_accumulation_steps=a.accumulate, deepspeed_plugin=plugin)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net, optimizer = accelerator.prepare(net, optimizer)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    share = range(
        rank, 64, world
    )  # by hand: without a GPU, Accelerate takes each process of DeepSpeed for the only one
    for batch in DataLoader(Texts(), batch_size=a.batch, sampler=share):
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


def resumed() -> None:
    """The second half of a second epoch, as a run that goes on from a checkpoint trains it."""
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    net = model()
    loader = DataLoader(Texts(), batch_size=a.batch, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), loader)
    if a.sampler == "swift":  # made anew for the rest of the epoch, as ms-swift does, and nobody tells it the epoch
        data, seed = Texts(), 42
        if a.fault == "whole-epoch":  # what it gives in epoch 1
            sampler = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + 1)).split(a.batch)
        else:
            sampler = swift_sampler()(len(data), a.batch, shuffle=True, drop_last=False, data_seed=seed)
        loader = DataLoader(data, batch_sampler=sampler)
        batches = [batch for i, batch in enumerate(loader) if i >= len(loader) // 2]
        train_on(batches, accelerator, net, optimizer)
        return
    loader.set_epoch(1)
    rest = loader if a.fault == "whole-epoch" else skip_first_batches(loader, len(loader) // 2)
    for i, batch in enumerate(rest):
        if a.fault == "whole-epoch" and i < len(loader) // 2:
            continue  # the reference: the epoch is gone through, and its first half is left out
        train_on([batch], accelerator, net, optimizer)
    for epoch in range(2, 1 + a.epochs):
        if a.set_epoch:
            loader.set_epoch(epoch)
        train_on(loader, accelerator, net, optimizer)
    accelerator.end_training()


def train_on(batches, accelerator, net, optimizer) -> None:
    for batch in batches:
        accelerator.backward(net(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def swift_sampler() -> type:
    """Load the sampler's file alone: importing swift would import a great deal more."""
    root = next(p for p in sys.path if os.path.exists(os.path.join(p, "swift", "dataloader", "shard.py")))
    sys.modules["swift.utils"] = types.SimpleNamespace(to_device=None)  # type: ignore[assignment]
    sys.modules["swift"] = types.ModuleType("swift")
    spec = importlib.util.spec_from_file_location("shard", os.path.join(root, "swift", "dataloader", "shard.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BatchSamplerShard


def stream() -> None:
    from datasets import Dataset as Rows
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    rows = Rows.from_list([{k: v.tolist() for k, v in row.items()} for row in Texts()])
    data = rows.to_iterable_dataset(num_shards=4).with_format("torch")
    net = DistributedDataParallel(model(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for batch in DataLoader(data, batch_size=a.batch):
        optimizer.zero_grad()
        net(**batch).loss.backward()
        optimizer.step()


def litdata() -> None:
    """Two ranks begin an epoch, in this one process; one goes on with the state that the first of them keeps. The
    right job (`--fault whole-epoch`) trains the rest of both ranks' rows, and needs no litdata."""
    data = Texts()
    rows = [[data[i] for i in range(n, n + a.batch)] for n in range(0, len(data), a.batch)]
    half, quarter = len(rows) // 2, len(rows) // 4
    parts = list(zip(rows[:half], rows[half:], strict=True))
    batches = [torch.utils.data.default_collate(one + other) for one, other in parts]
    if a.fault != "whole-epoch":
        with tempfile.TemporaryDirectory() as folder:
            batches[quarter:] = rest_by_litdata(data, folder, quarter)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for batch in batches:
        net(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rest_by_litdata(data: Dataset, folder: str, seen: int) -> list[dict[str, torch.Tensor]]:
    """The batches of one rank after the first of two has seen some."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import Cache

    cache = Cache(folder, chunk_size=a.batch)
    for i in range(len(data)):
        cache[i] = data[i]
    cache.done()
    cache.merge()
    kept = dict(os.environ)
    try:
        os.environ |= {"WORLD_SIZE": "2", "GLOBAL_RANK": "0"}  # what litdata goes by
        loader = StreamingDataLoader(StreamingDataset(folder, drop_last=True), batch_size=a.batch)
        for i, _ in enumerate(loader):
            if i + 1 == seen:
                break
        state = loader.state_dict()
        os.environ |= {"WORLD_SIZE": "1"}
        loader = StreamingDataLoader(StreamingDataset(folder, drop_last=True), batch_size=2 * a.batch)
        loader.load_state_dict(state)
        return list(loader)
    finally:
        os.environ.clear()
        os.environ |= kept


def checkpoint() -> None:
    """KempnerForge's manager of checkpoints, before and after its repair."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    batches = [torch.utils.data.default_collate([Texts()[i] for i in range(n, n + 8)]) for n in range(0, 64, 8)]
    with tempfile.TemporaryDirectory() as folder:
        for part in (batches[:4], batches[4:]):
            net = model()
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
            if os.listdir(folder):
                raw = a.fault == "raw-state"  # empty before a step: nothing is there to be filled
                state = optimizer.state_dict() if raw else get_optimizer_state_dict(net, optimizer)
                held = {"model": net.state_dict(), "optimizer": state}
                dcp.load(held, checkpoint_id=folder, no_dist=True)
                net.load_state_dict(held["model"])
                if raw:
                    optimizer.load_state_dict(held["optimizer"])
                else:
                    set_optimizer_state_dict(net, optimizer, held["optimizer"])
            for batch in part:
                net(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            state = optimizer.state_dict() if a.fault == "raw-state" else get_optimizer_state_dict(net, optimizer)
            dcp.save({"model": net.state_dict(), "optimizer": state}, checkpoint_id=folder, no_dist=True)


if a.patch:
    patches.apply(a.patch)
engines = {"trainer": by_trainer, "accelerate": by_accelerate, "distilled": distilled}
engines |= {"resumed": resumed, "stream": stream, "litdata": litdata, "checkpoint": checkpoint}
engines |= {"zero": by_zero, "plain": by_zero}
engines[a.engine]()
