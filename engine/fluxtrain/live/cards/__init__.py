"""Changes and advice of a run whose blocks are on several cards."""
