"""Measure what a plan needs: the machine's rates (`probe`), and a block of this model."""
