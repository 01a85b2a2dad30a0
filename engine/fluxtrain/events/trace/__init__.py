"""Where a step timeline is kept and read: ring, lanes, attribution, export."""
