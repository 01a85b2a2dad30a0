"""What the screen shows, as a pure fold over the run's events. No Textual in here."""
