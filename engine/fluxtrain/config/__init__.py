"""The configuration of a run: schema, text, errors, choices made from it."""
