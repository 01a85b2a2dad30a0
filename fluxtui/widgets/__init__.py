"""What screens are put together from: lines of spans, lists, fields, header and footer."""
