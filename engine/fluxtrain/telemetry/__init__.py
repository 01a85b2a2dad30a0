"""What a run says about itself: events, the journal they are kept in, and the control socket.

No torch here: the terminal application imports this package.
"""
