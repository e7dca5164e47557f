"""What fits this library into models and trainers of transformers."""
