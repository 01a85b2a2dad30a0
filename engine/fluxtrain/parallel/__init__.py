"""A model sharded over processes by torch's FSDP2, and what its communication costs compressed."""
