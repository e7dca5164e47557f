"""The data sets of the paper, one family per file."""
