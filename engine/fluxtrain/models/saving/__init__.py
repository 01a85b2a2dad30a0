"""What stands beside a saved model's weights: configuration, generation settings, tokenizer."""
