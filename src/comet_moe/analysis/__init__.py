"""Statistics: plain tables in, plain tables out; nothing here needs torch."""
