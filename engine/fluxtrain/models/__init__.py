"""Model folders: read, loaded, exported."""
