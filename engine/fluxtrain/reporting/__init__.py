"""What a run tells: events, console lines, gauges, its log."""
