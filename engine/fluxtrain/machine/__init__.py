"""What this machine is: GPUs, memory, disks, limits; nothing is measured here."""
