"""What every stream and thread did in the last steps: cut into steps, kept in a ring, exported."""
