"""From a configuration, a model and this machine to a placement, or a refusal."""
