"""Models and tokenizers of transformers, as tasks want them."""
