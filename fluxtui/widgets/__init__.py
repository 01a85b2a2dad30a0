"""The widgets of the screens: lines of spans, lists, fields, header and footer."""
