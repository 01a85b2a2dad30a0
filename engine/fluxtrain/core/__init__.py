"""The engine of one model: its groups of weights, the passes over its blocks, and the updates."""
