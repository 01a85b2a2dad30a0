"""The sources of events: a run directory, its live pipe, a recording; and the machine itself."""
