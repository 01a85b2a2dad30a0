"""The run directory: what it holds, who holds it, and how to talk to the trainer in it."""
