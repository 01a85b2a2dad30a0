"""The head with its loss: logits left uncomputed, a loss by chunks, on one card or on all."""
