"""The commands beside `train`: plan, inspect, dry-run, doctor."""
