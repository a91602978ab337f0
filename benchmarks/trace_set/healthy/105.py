# HF Trainer custom optimizers tuple and callback
import tempfile
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3))

    def forward(self, feats, labels=None):
        logits = self.net(feats)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Watch(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        if state.global_step % 10 == 0:
            print("step", state.global_step, "lr", kw["optimizer"].param_groups[0]["lr"])


torch.manual_seed(0)
X = torch.randn(384, 12)
Y = X[:, :3].argmax(1)
data = [{"feats": x, "labels": y} for x, y in zip(X, Y)]
model = Plain()
STEPS = 30
opt = torch.optim.SGD([
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-3},
    {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
], lr=0.1, momentum=0.9)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=STEPS + 1)
with tempfile.TemporaryDirectory() as tmp:
    args = TrainingArguments(output_dir=tmp, max_steps=STEPS, per_device_train_batch_size=32, report_to=[],
                             save_strategy="no", logging_steps=10, use_cpu=True, disable_tqdm=True)
    Trainer(model=model, args=args, train_dataset=data, optimizers=(opt, sched), callbacks=[Watch()]).train()
