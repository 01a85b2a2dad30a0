"""The first tables. A new folder gets all tables from `store` at once, with the newest version's
stamp; scripts like this one lead an older folder there."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: no folder is older."""
