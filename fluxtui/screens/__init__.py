"""The screens: each draws a view of the run."""
