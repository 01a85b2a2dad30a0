"""What a user can do, by subject: each class gives the app the actions of one."""
