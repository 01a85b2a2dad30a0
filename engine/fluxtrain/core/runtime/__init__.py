"""The state that all units of one wrapped model share, and what begins and ends each pass."""
