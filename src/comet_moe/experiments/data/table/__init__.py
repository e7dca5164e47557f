"""Tables with any columns: raw files in, encoded arrays out."""
