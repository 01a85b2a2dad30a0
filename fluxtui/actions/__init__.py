"""What a user can do: the table of actions, the keys made from it, and what the actions share."""
