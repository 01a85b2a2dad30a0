"""Text from a model: prompts as tokens, the next token, answers in batches, text as it comes."""
