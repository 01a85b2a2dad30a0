"""Constants of a plan, measured before the run on this machine."""
