"""Files: opened without following links, written whole or not at all, locked, cached."""
