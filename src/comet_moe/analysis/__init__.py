"""Statistics of studies: reading, tables, loss by number of trials, t-tests. Does not need torch."""
