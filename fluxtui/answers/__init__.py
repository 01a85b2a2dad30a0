"""Answers of the wizard: the questions, the answers as one value, and what they become."""
