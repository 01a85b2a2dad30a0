"""The life of a run: inputs, plan, session, steps, checkpoints, changes, what is observed."""
