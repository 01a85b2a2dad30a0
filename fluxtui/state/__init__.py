"""The state that the screens show: a pure fold over the run's events, without Textual."""
