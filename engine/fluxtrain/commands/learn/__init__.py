"""A path to learn how tuning and its service work: eight tasks, each checked on two cores."""
