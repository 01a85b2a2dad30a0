"""Reports a run to trackers of other packages, in threads that never hold it up."""
