"""The steps of the wizard, one file for each kind. They draw what they are shown and post what
changes."""
