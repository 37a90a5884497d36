"""`cachebench sim`: how many bytes a policy asks of the origin, beside what is possible at all."""
