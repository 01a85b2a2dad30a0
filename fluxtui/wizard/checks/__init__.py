"""Check answers by reading files, as the trainer will: models, data, earlier runs."""
