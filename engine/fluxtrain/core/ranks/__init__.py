"""Several processes that train one model together, on torch.distributed."""
