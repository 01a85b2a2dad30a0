"""What is slow on this machine and whether the engine computes right on it: `fluxtrain doctor`."""
