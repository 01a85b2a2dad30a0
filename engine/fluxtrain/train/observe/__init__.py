"""The reports of a run: events, console lines, gauges, its log."""
