"""Take over a user's optimizer: its steps, its state, optimizers of other packages."""
