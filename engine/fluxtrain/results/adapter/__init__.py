"""Read an adapter, check it, and put it on its base."""
