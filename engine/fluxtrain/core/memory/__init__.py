"""Where weights and activations are: groups, their segments, device slots and host buffers."""
