"""Several GPUs of one process: streams that do not make them wait for each other."""
