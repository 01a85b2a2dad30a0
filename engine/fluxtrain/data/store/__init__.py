"""The tokens of a data set: in memory, or in shards on disk that further runs use again."""
