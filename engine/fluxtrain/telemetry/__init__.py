"""The events of a run, the journal that keeps them, and the live pipe.

No torch here: the terminal application imports this package.
"""
