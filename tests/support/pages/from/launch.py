from sagemaker.huggingface import HuggingFace

estimator = HuggingFace(
    entry_point="train.py",
    role="arn:aws:iam::123456789012:role/training",
    instance_type="ml.g5.12xlarge",
    instance_count=1,
    pytorch_version="2.13",
    hyperparameters={"num_train_epochs": 2, "per_device_train_batch_size": 16, "learning_rate": 2e-5},
    distribution={"torch_distributed": {"enabled": True}},
    max_run=6 * 3600,
)
estimator.fit()
