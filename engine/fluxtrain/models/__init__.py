"""Model folders: read, loaded, checked, saved; text from a model (`generate`)."""
