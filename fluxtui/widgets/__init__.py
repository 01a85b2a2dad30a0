"""What panels draw with: spans, bars, sparklines, charts, and the widget that diffs lines."""
