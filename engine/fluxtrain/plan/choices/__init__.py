"""Which layout is taken, and why."""
