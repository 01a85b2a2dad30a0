"""Several cards of one machine: which torch sees, how fast each is, what passes between them."""
