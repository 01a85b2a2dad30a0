"""What a run says and where: events, journal, live pipe, run folder, typed answers. No torch."""
