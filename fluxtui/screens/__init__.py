"""The screens: each draws a view, none changes the run."""
