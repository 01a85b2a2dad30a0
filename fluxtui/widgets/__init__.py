"""What panels draw with: lines of spans, bars, sparklines, charts, and the widget that diffs them."""
