"""The commands of `fluxtrain` other than `train`, and what their output has in common."""
