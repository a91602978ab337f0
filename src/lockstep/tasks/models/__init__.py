"""Models and tokenizers of transformers, adapted for the tasks."""
