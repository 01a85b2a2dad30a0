"""What would give wrong gradients without a word: noticed, and refused with the cure."""
