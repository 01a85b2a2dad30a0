"""Read an adapter, check it, and put it beside its base."""
