"""The state that all parts of one wrapped model share, and the pass of one unit."""
