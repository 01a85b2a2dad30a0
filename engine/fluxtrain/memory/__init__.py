"""Where the bytes are: host arenas, parameter groups, device slots and gradients."""
