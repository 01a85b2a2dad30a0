"""Conversations as chat templates write them, and which of the characters are the assistant's."""
