from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

name = "distilbert/distilbert-base-uncased"
tokenizer = AutoTokenizer.from_pretrained(name)
data = load_dataset("csv", data_files="reviews.csv")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=128), batched=True)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
args = TrainingArguments(
    "outputs/reviews",
    per_device_train_batch_size=16,
    num_train_epochs=2,
    learning_rate=2e-5,
    warmup_steps=10,
)
Trainer(model, args, train_dataset=data["train"], processing_class=tokenizer).train()
