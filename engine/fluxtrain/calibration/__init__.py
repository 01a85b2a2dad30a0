"""Measure the constants of a plan on this machine, before the run."""
