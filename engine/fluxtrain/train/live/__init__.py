"""Changes of a running training: advice, trial, undo, and the moves that they take."""
