"""Several cards: which blocks each computes, and what a step of all of them takes."""
