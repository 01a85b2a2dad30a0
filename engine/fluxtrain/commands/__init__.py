"""The commands of `fluxtrain` beside `train`, and what their output has in common."""
