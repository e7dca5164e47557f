"""Two made-up tables, one where routing pays and one where it does not, and drawings of both."""
