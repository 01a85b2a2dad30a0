"""What the machine is and how fast its parts are. `bandwidth` and `probe` bring torch when used."""
