"""One device of several: what belongs to it, and what it copies ahead."""
