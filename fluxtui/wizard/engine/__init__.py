"""Ask the trainer in subprocesses: the machine, the data, the plan, a dry run."""
