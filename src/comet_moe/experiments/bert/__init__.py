"""COMET-BERT from the command line: fine-tuning, conversion and distillation."""
