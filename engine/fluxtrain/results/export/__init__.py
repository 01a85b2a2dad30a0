"""What becomes of a trained adapter: its own folder, or weights that hold it, checked."""
