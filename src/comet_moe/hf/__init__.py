"""Parts that connect this library with the models and trainers of transformers."""
