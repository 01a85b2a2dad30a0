"""Where events come from: a run directory, its live pipe, a recording; and the machine itself."""
