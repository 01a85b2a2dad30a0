"""The activity of every stream and thread in the last steps: cut, kept in a ring, exported."""
